// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Requests of which most fields are valid. They reach code behind the checks of arguments.

use super::fuzzer::{RequestFuzzer, NO_HANDLES};
use crate::support::abi::*;

/// Maximum number of handles that a thread keeps. It bounds the memory of its regions.
const HANDLES: usize = 24;

/// Ports with and without listeners.
const PORTS: [u32; 4] = [0, 1, 2, u32::MAX];

impl RequestFuzzer {
    /// Makes a request of which most fields are valid.
    pub(super) fn request_plausible(&mut self, device: &Device, number: u32) -> Errno {
        let handle = self.handle();
        match number {
            KITE_IOC_BIND_NR => device.ioctl(number, &mut binding()),
            KITE_IOC_ALLOC_NR => self.alloc(device),
            KITE_IOC_MAP_NR => self.map(device),
            KITE_IOC_UNMAP_NR | KITE_IOC_FREE_NR => {
                self.remove_handle(handle);
                device.ioctl(number, &mut kite_handle { handle })
            }
            KITE_IOC_READ_NR | KITE_IOC_WRITE_NR => self.transfer(device, number),
            KITE_IOC_READV_NR | KITE_IOC_WRITEV_NR => self.vectored(device, number),
            KITE_IOC_LIST_REGIONS_NR => {
                let mut list = kite_list_regions {
                    node: self.random.below(5) as u32,
                    count: self.number().min(700) as u32,
                    cursor: self.number(),
                    entries: self.random_address(),
                };
                device.ioctl(number, &mut list)
            }
            KITE_IOC_GET_VIEW_NR => {
                let mut nodes = kite_get_view {
                    count: self.number() as u32,
                    members: self.random_address(),
                    ..Default::default()
                };
                device.ioctl(number, &mut nodes)
            }
            KITE_IOC_GRANT_NR => {
                let mut grant = kite_grant {
                    handle,
                    uid: self.random.pick(&[0, 0, 1, 1000, 1001, u32::MAX]),
                    rights: self.random.pick(&[0, 1, 3, 7, 7, 7, 8]),
                    flags: self.random.pick(&[0, 0, 0, 1, 1, 2]),
                    ..Default::default()
                };
                device.ioctl(number, &mut grant)
            }
            KITE_IOC_MIGRATE_NR => {
                let mut wanted = kite_migrate {
                    handle,
                    nodes: self.nodes(),
                    node_count: self.random.pick(&[0, 0, 1, 1, 2, 3, 64, 65, u32::MAX]),
                    timeout_ms: self.random.pick(&[0, 1, 10, 1000]),
                };
                device.ioctl(number, &mut wanted)
            }
            KITE_IOC_RENAME_NR => {
                let mut wanted = kite_rename {
                    handle,
                    timeout_ms: self.random.pick(&[0, 1, 10, 1000]),
                    reserved: self.random.pick(&[0, 0, 0, 1]),
                    name: name(&self.name()),
                };
                device.ioctl(number, &mut wanted)
            }
            KITE_IOC_FILL_NR => {
                let mut set = kite_fill {
                    handle,
                    offset: self.random.below(50),
                    len: self.number(),
                    byte: self.random.pick(&[0, 1, 255, 256]),
                    ..Default::default()
                };
                device.ioctl(number, &mut set)
            }
            KITE_IOC_COPY_NR => {
                let mut copy = kite_copy {
                    from: handle,
                    from_offset: self.random.below(50),
                    to: self.handle(),
                    to_offset: self.random.below(50),
                    len: self.number(),
                    ..Default::default()
                };
                device.ioctl(number, &mut copy)
            }
            KITE_IOC_LOCK_NR => {
                let mut lock = kite_lock {
                    handle,
                    number: self.random.below(3),
                    flags: self.random.pick(&[0, 0, 1, 2, 3, 4]),
                    timeout_ms: 1,
                    ..Default::default()
                };
                device.ioctl(number, &mut lock)
            }
            KITE_IOC_UNLOCK_NR => {
                let mut unlock = kite_unlock {
                    // Numbers of locks are between those of handles.
                    lock: handle + self.random.below(4),
                    ..Default::default()
                };
                device.ioctl(number, &mut unlock)
            }
            KITE_IOC_BARRIER_NR => {
                let mut barrier = kite_barrier {
                    handle,
                    number: self.random.below(3),
                    count: self.random.pick(&[0, 1, 1, 2, 3, u32::MAX]),
                    timeout_ms: 1,
                    ..Default::default()
                };
                device.ioctl(number, &mut barrier)
            }
            KITE_IOC_REGISTER_NR => {
                let mut register = kite_register {
                    addr: self.random_address(),
                    len: self
                        .random
                        .pick(&[0, 1, 4096, 5000, 65_536, 1 << 30, 1 << 60]),
                    other_rights: self.random.pick(&[0, 3, 7, 8]),
                    name: name(self.random.pick(&["", "", "", "a", "b"])),
                    ..Default::default()
                };
                let errno = device.ioctl(number, &mut register);
                self.add_handle(errno, register.handle)
            }
            KITE_IOC_CREATE_QUEUE_NR => {
                let mut queue = kite_create_queue {
                    addr: self.random_address(),
                    len: self.number(),
                    entries: self.random.pick(&[0, 1, 3, 8, 64, 1024, 2048]),
                    ..Default::default()
                };
                device.ioctl(number, &mut queue)
            }
            KITE_IOC_SET_PRIORITY_NR => {
                let mut wanted = kite_priority {
                    priority: self.random.pick(&[0, 1, 1, 2]),
                    ..Default::default()
                };
                device.ioctl(number, &mut wanted)
            }
            KITE_IOC_LIST_LIMITS_NR => {
                let mut limits = kite_list_limits {
                    limits: self.random_address(),
                    count: self.number().min(700) as u32,
                    ..Default::default()
                };
                device.ioctl(number, &mut limits)
            }
            KITE_IOC_LIST_VQPS_NR => {
                let mut vqps = kite_list_vqps {
                    vqps: self.random_address(),
                    count: self.number().min(700) as u32,
                    ..Default::default()
                };
                device.ioctl(number, &mut vqps)
            }
            KITE_IOC_ENTER_NR => {
                let mut enter = kite_enter {
                    queue: handle + self.random.below(4),
                    want: self.random.pick(&[0, 0, 1, 8, 1025]),
                    timeout_ms: 1,
                    ..Default::default()
                };
                device.ioctl(number, &mut enter)
            }
            KITE_IOC_CONNECT_NR => {
                let mut connect = kite_connect {
                    node: self.random.pick(&[0, 1, 2, 2, 2, 3, 70_000]),
                    port: self.random.pick(&PORTS),
                    timeout_ms: 10,
                    ..Default::default()
                };
                device.ioctl(number, &mut connect)
            }
            KITE_IOC_LISTEN_NR => {
                let mut listen = kite_listen {
                    port: self.random.pick(&PORTS),
                    ..Default::default()
                };
                device.ioctl(number, &mut listen)
            }
            KITE_IOC_ACCEPT_NR => {
                let mut accept = kite_accept {
                    listener: handle + self.random.below(4),
                    timeout_ms: 1,
                    flags: self.random.pick(&[0, KITE_NOWAIT]),
                    ..Default::default()
                };
                device.ioctl(number, &mut accept)
            }
            KITE_IOC_CLOSE_VQP_NR => {
                let vqp = handle + self.random.below(4);
                device.ioctl(number, &mut kite_close_vqp { vqp })
            }
            KITE_IOC_CLOSE_LISTENER_NR => {
                let listener = handle + self.random.below(4);
                device.ioctl(number, &mut kite_close_listener { listener })
            }
            KITE_IOC_DESTROY_QUEUE_NR => {
                let mut unqueue = kite_destroy_queue {
                    queue: handle + self.random.below(4),
                };
                device.ioctl(number, &mut unqueue)
            }
            _ => self.request_random_words(device, number),
        }
    }

    /// Returns the address of an array of nodes, or 0.
    fn nodes(&mut self) -> u64 {
        let nodes = self.scratch.base + 8;
        for i in 0..64 {
            let node = self.random.pick(&[1_u32, 2, 3, 1, 2, 3, 1, 2, 0, 9]);
            // SAFETY: within the first page of the scratch mapping, which other requests of this
            // thread alone write to.
            unsafe { (nodes as *mut u32).add(i).write(node) };
        }
        self.random
            .pick(&[nodes as u64, nodes as u64, nodes as u64, 0])
    }

    fn alloc(&mut self, device: &Device) -> Errno {
        let mut alloc = kite_alloc {
            len: match self.random.below(20) {
                0 => self.random.next() | (1 << 54),
                _ => self.random.size(100_000),
            },
            nodes: self.nodes(),
            node_count: self.random.pick(&[0, 0, 1, 1, 2, 3, 64, 65, u32::MAX]),
            other_rights: self.random.pick(&[0, 1, 3, 7, 7, 7, 8]),
            name: name(&self.name()),
            ..Default::default()
        };
        // More regions would exhaust the memory.
        if self.handles.len() >= HANDLES {
            let (_, handle) = self.handles.swap_remove(NO_HANDLES.len());
            return device.ioctl(KITE_IOC_FREE_NR, &mut kite_handle { handle });
        }
        let errno = device.ioctl(KITE_IOC_ALLOC_NR, &mut alloc);
        self.add_handle(errno, alloc.handle)
    }

    fn map(&mut self, device: &Device) -> Errno {
        let mut map = kite_map {
            name: name(&self.name()),
            rights: self.random.pick(&[1, 2, 3, 4, 7, 7, 7, 0, 8]),
            region: self.random.pick(&[0, 0, 0, 0, 0, 1]),
            flags: self
                .random
                .pick(&[0, 0, 0, KITE_MAP_OWNER, KITE_MAP_OWNER, 2]),
            owner: self.random.pick(&[0, 0, 0, 0, 1000, u32::MAX]),
            ..Default::default()
        };
        if self.handles.len() >= HANDLES {
            let (_, handle) = self.handles.swap_remove(NO_HANDLES.len());
            return device.ioctl(KITE_IOC_UNMAP_NR, &mut kite_handle { handle });
        }
        let errno = device.ioctl(KITE_IOC_MAP_NR, &mut map);
        self.add_handle(errno, map.handle)
    }

    fn transfer(&mut self, device: &Device, number: u32) -> Errno {
        let mut transfer = kite_rw {
            handle: self.handle(),
            offset: match self.random.below(3) {
                0 => self.number(),
                _ => self.random.below(50),
            },
            addr: self.random_address(),
            len: self.number(),
            timeout_ms: self.random.pick(&[0, 0, 0, 1, 5, u32::MAX]),
            reserved: self.random.pick(&[0, 0, 0, 0, 0, 0, 7]),
        };
        // The scratch mapping bounds the length.
        if transfer.addr < 1 << 47 && transfer.len < 1 << 32 {
            transfer.len = transfer.len.min(60_000);
        }
        device.ioctl(number, &mut transfer)
    }

    fn vectored(&mut self, device: &Device, number: u32) -> Errno {
        let segments: Vec<kite_segment> = (0..self.random.below(20))
            .map(|_| kite_segment {
                offset: self.random.pick(&[0, 1, 4095, 1 << 20, u64::MAX]),
                addr: self.random_address(),
                len: self
                    .random
                    .pick(&[0, 1, 100, 5000, 60_000, 1 << 40, u64::MAX]),
            })
            .collect();
        // Includes memory behind the segments, which may be unmapped.
        let extra = self.random.pick(&[0, 0, 0, 0, 1, 2000]);
        let mut rwv = kite_rwv {
            handle: self.handle(),
            segments: match self.random.below(8) {
                0 => self.random_address(),
                _ => segments.as_ptr() as u64,
            },
            count: segments.len() as u32 + extra,
            timeout_ms: self.random.pick(&[0, 1, u32::MAX]),
        };
        device.ioctl(number, &mut rwv)
    }
}
