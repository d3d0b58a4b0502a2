// SPDX-License-Identifier: GPL-2.0

//! RNIC as registered with the RDMA core, and the attributes of its ports.

use crate::{
    bindings::{self, inline},
    errno,
    sys::compat,
};
use core::ptr::NonNull;
use kernel::{device::Device, error::to_result, prelude::*};

/// Port number. kite uses the first port of each RNIC.
pub(crate) type PortNum = u32;

/// Global identifier: address of a port.
pub(crate) type Gid = [u8; 16];

/// Link layer of a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LinkLayer {
    /// InfiniBand: LIDs, and GIDs across subnets.
    InfiniBand,
    /// RoCE: GIDs only.
    Ethernet,
}

/// Attributes of a port.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PortAttr {
    /// Set if the port can send and receive.
    pub(crate) active: bool,
    /// Local identifier. InfiniBand only.
    pub(crate) lid: u16,
    /// Maximum payload of a packet, in bytes.
    pub(crate) mtu: u32,
    /// Link layer.
    pub(crate) link_layer: LinkLayer,
}

/// Limits of an RNIC.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DeviceLimits {
    /// Maximum scatter-gather entries of a send request.
    pub(crate) max_send_sge: u32,
    /// Maximum entries of a CQ.
    pub(crate) max_cqe: u32,
    /// Maximum RDMA READs and atomics in flight on a QP, as responder and as initiator. At most 16.
    pub(crate) max_rd_atomic: u8,
    /// Maximum pages registered by one work request.
    pub(crate) max_reg_pages: u32,
}

/// RNIC.
///
/// # Invariants
///
/// The pointer is a device of the RDMA core. The device is registered while any copy of this object is used.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct IbDevice(NonNull<bindings::ib_device>);

// SAFETY: The functions of the RDMA core on a device may be called from any thread.
unsafe impl Send for IbDevice {}
// SAFETY: The argument for `Send` holds here too.
unsafe impl Sync for IbDevice {}

impl IbDevice {
    /// Wraps a device.
    ///
    /// # Safety
    ///
    /// `ptr` must be a registered device. Neither the result nor an object created from the result may be
    /// used after the client's `remove` for the device has returned.
    pub(super) unsafe fn from_raw(ptr: NonNull<bindings::ib_device>) -> Self {
        // INVARIANT: Guaranteed by the safety requirements.
        Self(ptr)
    }

    /// Returns the device of the driver model, which names the RNIC in log messages.
    pub(crate) fn as_device(&self) -> &Device {
        // SAFETY: The device is registered while `self` is used, by the type invariants. The member is the
        // device of the union for devices that a driver has allocated.
        unsafe { Device::from_raw((&raw mut (*self.as_raw()).__bindgen_anon_1).cast()) }
    }

    pub(crate) fn as_raw(self) -> *mut bindings::ib_device {
        self.0.as_ptr()
    }

    /// Returns the first port.
    pub(crate) fn first_port(self) -> PortNum {
        // SAFETY: The device is registered, by the type invariants.
        unsafe { inline::rdma_start_port(self.as_raw()) }
    }

    /// Returns the name, truncated to 63 bytes and padded with zeros. Call this function only in a callback
    /// for the device's arrival or new name. The name does not change during those.
    pub(crate) fn name(self) -> [u8; 64] {
        // SAFETY: The device is registered, by the type invariants. A concurrent rename could mix two names.
        // The copy would still be terminated, since its last byte stays zero.
        let name = unsafe { &(*self.as_raw()).name };
        let mut out = [0; 64];
        for (dst, src) in out.iter_mut().take(63).zip(name.iter()) {
            *dst = *src;
        }
        out
    }

    /// Returns `true` if the current process may use the device. With `rdma system set netns exclusive`, only
    /// processes in the network namespace of the device may.
    pub(crate) fn is_accessible(self) -> bool {
        // SAFETY: The device is registered, by the type invariants. A process in a system call has namespaces.
        unsafe { inline::kite_device_accessible(self.as_raw()) }
    }

    /// Returns the limits of the device.
    pub(crate) fn limits(self) -> DeviceLimits {
        // SAFETY: The device is registered, by the type invariants. The attributes do not change after
        // registration.
        let attrs = unsafe { &(*self.as_raw()).attrs };
        DeviceLimits {
            max_send_sge: compat::device_limit(attrs.max_send_sge),
            max_cqe: compat::device_limit(attrs.max_cqe),
            max_rd_atomic: attrs
                .max_qp_rd_atom
                .min(attrs.max_qp_init_rd_atom)
                .clamp(0, 16) as u8,
            max_reg_pages: attrs.max_fast_reg_page_list_len,
        }
    }

    /// Returns `true` if work requests of the kernel may be atomics. mlx5 supports them only for user space
    /// (`wr.c`, `mlx5_ib_post_send`). Devices with `IB_ATOMIC_NONE` do not support them.
    pub(crate) fn has_kernel_atomics(self) -> bool {
        // SAFETY: The device is registered, by the type invariants. Driver ID and capability do not change
        // after registration.
        let (driver, cap) = unsafe {
            let device = &*self.as_raw();
            (device.ops.driver_id, device.attrs.atomic_cap)
        };
        let none = bindings::ib_atomic_cap_IB_ATOMIC_NONE;
        driver != bindings::rdma_driver_id_RDMA_DRIVER_MLX5 && cap != none
    }

    /// Returns the access rights of peers on a QP or a memory key.
    pub(super) fn access_flags(self) -> c_int {
        let atomic = match self.has_kernel_atomics() {
            true => bindings::ib_access_flags_IB_ACCESS_REMOTE_ATOMIC,
            false => 0,
        };
        (bindings::ib_access_flags_IB_ACCESS_LOCAL_WRITE
            | bindings::ib_access_flags_IB_ACCESS_REMOTE_READ
            | bindings::ib_access_flags_IB_ACCESS_REMOTE_WRITE
            | atomic) as c_int
    }

    /// Returns `true` if READs must fit into one packet. Soft-RoCE treats the packets of a retransmitted
    /// response as out of order. It then completes the READ as if all had arrived (`rxe_comp.c`,
    /// `check_ack`).
    pub(crate) fn needs_single_packet_reads(self) -> bool {
        // SAFETY: The device is registered, by the type invariants.
        let driver = unsafe { (*self.as_raw()).ops.driver_id };
        driver == bindings::rdma_driver_id_RDMA_DRIVER_RXE
    }

    /// Returns the number of completion vectors, at least 1.
    pub(crate) fn num_comp_vectors(self) -> u32 {
        // SAFETY: The device is registered, by the type invariants.
        unsafe { (*self.as_raw()).num_comp_vectors }.max(1) as u32
    }

    /// Returns `true` if a port is active, from the cache of the RDMA core. The RNIC is not queried.
    pub(crate) fn is_port_active(self, port: PortNum) -> bool {
        let mut state = bindings::ib_port_state_IB_PORT_NOP;
        // SAFETY: The device is registered, by the type invariants. `state` is valid for writes.
        let code = unsafe { bindings::ib_get_cached_port_state(self.as_raw(), port, &mut state) };
        code == 0 && state == bindings::ib_port_state_IB_PORT_ACTIVE
    }

    /// Queries the attributes of a port.
    pub(crate) fn query_port(self, port: PortNum) -> Result<PortAttr> {
        let mut attr: bindings::ib_port_attr = pin_init::zeroed();
        // SAFETY: The device is registered, by the type invariants. `attr` is valid for writes.
        to_result(unsafe { bindings::ib_query_port(self.as_raw(), port, &mut attr) })?;
        // SAFETY: The device is registered, by the type invariants.
        let link_layer = unsafe { bindings::rdma_port_get_link_layer(self.as_raw(), port) };
        Ok(PortAttr {
            active: attr.state == bindings::ib_port_state_IB_PORT_ACTIVE,
            lid: attr.lid as u16,
            mtu: 128 << attr.active_mtu,
            link_layer: if link_layer == bindings::rdma_link_layer_IB_LINK_LAYER_ETHERNET {
                LinkLayer::Ethernet
            } else {
                LinkLayer::InfiniBand
            },
        })
    }

    /// Chooses the GID that peers use for a port. Returns the GID and its index in the table.
    ///
    /// On Ethernet the last entry that is set is chosen: RoCE v2 follows v1 for each address, and routable
    /// addresses (IPv4) follow the link-local one.
    ///
    /// # Errors
    ///
    /// - `ENODATA`: the table is empty.
    pub(crate) fn preferred_gid(self, port: PortNum, link_layer: LinkLayer) -> Result<(u8, Gid)> {
        self.usable_gids(port, link_layer)
            .next()
            .ok_or_else(errno::nodata)
    }

    /// Returns the GID table entries that are set, in order of preference.
    fn usable_gids(self, port: PortNum, link_layer: LinkLayer) -> impl Iterator<Item = (u8, Gid)> {
        let last = if link_layer == LinkLayer::Ethernet {
            15
        } else {
            0
        };
        let entry = move |i| Some((i, self.query_gid(port, i)?));
        (0..=last).rev().filter_map(entry)
    }

    /// Finds a GID of a port. Returns its index and the GID. If several entries match, returns the preferred
    /// one.
    ///
    /// # Errors
    ///
    /// - `ENODATA`: the port does not have the GID.
    pub(crate) fn find_gid(
        self,
        port: PortNum,
        link_layer: LinkLayer,
        gid: &Gid,
    ) -> Result<(u8, Gid)> {
        let mut gids = self.usable_gids(port, link_layer);
        gids.find(|(_, ours)| ours == gid).ok_or_else(errno::nodata)
    }

    fn query_gid(self, port: PortNum, index: u8) -> Option<Gid> {
        let mut gid: bindings::ib_gid = pin_init::zeroed();
        // SAFETY: The device is registered, by the type invariants. `gid` is valid for writes.
        let ret =
            unsafe { bindings::rdma_query_gid(self.as_raw(), port, c_int::from(index), &mut gid) };
        // SAFETY: Every bit pattern is a valid GID.
        let raw = unsafe { gid.raw };
        (ret == 0 && raw != [0; 16]).then_some(raw)
    }
}
