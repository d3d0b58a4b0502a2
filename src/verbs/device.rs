// SPDX-License-Identifier: GPL-2.0

//! An RNIC as the RDMA core knows it, and what its port says of itself.

use crate::{
    bindings::{self, inline},
    errno,
    sys::compat,
};
use core::ptr::NonNull;
use kernel::{error::to_result, prelude::*};

/// A port number; we use the first port of each RNIC.
pub(crate) type PortNum = u32;

/// A global identifier: the address of a port.
pub(crate) type Gid = [u8; 16];

/// How packets travel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LinkLayer {
    /// InfiniBand: LIDs, and GIDs across subnets.
    InfiniBand,
    /// RoCE: GIDs only.
    Ethernet,
}

/// What a port says of itself.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PortAttr {
    /// Whether it can send and receive.
    pub(crate) active: bool,
    /// Local identifier, on InfiniBand.
    pub(crate) lid: u16,
    /// Largest payload of a packet, in bytes.
    pub(crate) mtu: u32,
    /// Link layer.
    pub(crate) link_layer: LinkLayer,
}

/// Limits of an RNIC.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DeviceLimits {
    /// Most scatter-gather entries of a send request.
    pub(crate) max_send_sge: u32,
    /// Most entries of a completion queue.
    pub(crate) max_cqe: u32,
    /// Most RDMA reads and atomics in flight on a queue pair, as responder and as initiator.
    pub(crate) max_rd_atomic: u8,
    /// Most pages of memory that a work request makes a key to.
    pub(crate) max_reg_pages: u32,
}

/// An RNIC.
///
/// # Invariants
///
/// The pointer is a device of the RDMA core, registered for as long as a copy of this is used.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct IbDevice(NonNull<bindings::ib_device>);

// SAFETY: The RDMA core's calls on a device may be made from any thread.
unsafe impl Send for IbDevice {}
// SAFETY: As above.
unsafe impl Sync for IbDevice {}

impl IbDevice {
    /// # Safety
    ///
    /// `ptr` must be a registered device, and neither the result nor any object made from it may be
    /// used after the client's `remove` for the device has returned.
    pub(super) unsafe fn from_raw(ptr: NonNull<bindings::ib_device>) -> Self {
        // INVARIANT: By the safety requirements.
        Self(ptr)
    }

    pub(crate) fn as_raw(self) -> *mut bindings::ib_device {
        self.0.as_ptr()
    }

    /// The first port.
    pub(crate) fn first_port(self) -> PortNum {
        // SAFETY: By the type invariants.
        unsafe { inline::rdma_start_port(self.as_raw()) }
    }

    /// Copies the name, zero padded, cut to the room there is. To be called while the RDMA core tells of
    /// the device's arrival or of another name: then nobody renames it.
    pub(crate) fn name(self) -> [u8; 64] {
        // SAFETY: By the type invariants. Were it renamed while we copy, the name would be mixed, but not
        // unterminated, since the last byte of ours stays zero.
        let name = unsafe { &(*self.as_raw()).name };
        let mut out = [0; 64];
        for (dst, src) in out.iter_mut().take(63).zip(name.iter()) {
            *dst = *src;
        }
        out
    }

    /// Limits of the device.
    pub(crate) fn limits(self) -> DeviceLimits {
        // SAFETY: By the type invariants; the attributes do not change after registration.
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

    /// Whether work requests of the kernel may be atomic operations. mlx5 has them for user space alone (`wr.c`,
    /// `mlx5_ib_post_send`), and others for nobody.
    pub(crate) fn has_kernel_atomics(self) -> bool {
        // SAFETY: By the type invariants; neither changes after registration.
        let (driver, cap) = unsafe {
            let device = &*self.as_raw();
            (device.ops.driver_id, device.attrs.atomic_cap)
        };
        let none = bindings::ib_atomic_cap_IB_ATOMIC_NONE;
        driver != bindings::rdma_driver_id_RDMA_DRIVER_MLX5 && cap != none
    }

    /// What peers may do by a queue pair or a key.
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

    /// Whether reads must fit in a packet. Soft-RoCE (`rxe_comp.c`, `check_ack`) takes the packets of a
    /// response that was sent again for out of order, and then completes the read as if all had come.
    pub(crate) fn needs_single_packet_reads(self) -> bool {
        // SAFETY: By the type invariants.
        let driver = unsafe { (*self.as_raw()).ops.driver_id };
        driver == bindings::rdma_driver_id_RDMA_DRIVER_RXE
    }

    /// Number of completion vectors, at least 1.
    pub(crate) fn num_comp_vectors(self) -> u32 {
        // SAFETY: By the type invariants.
        unsafe { (*self.as_raw()).num_comp_vectors }.max(1) as u32
    }

    /// Whether a port is active, as the RDMA core has heard last: the RNIC is not asked.
    pub(crate) fn is_port_active(self, port: PortNum) -> bool {
        let mut state = bindings::ib_port_state_IB_PORT_NOP;
        // SAFETY: By the type invariants, and `state` may be written.
        let code = unsafe { bindings::ib_get_cached_port_state(self.as_raw(), port, &mut state) };
        code == 0 && state == bindings::ib_port_state_IB_PORT_ACTIVE
    }

    /// Asks a port for its state.
    pub(crate) fn query_port(self, port: PortNum) -> Result<PortAttr> {
        let mut attr: bindings::ib_port_attr = pin_init::zeroed();
        // SAFETY: By the type invariants, and `attr` may be written.
        to_result(unsafe { bindings::ib_query_port(self.as_raw(), port, &mut attr) })?;
        // SAFETY: By the type invariants.
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

    /// Chooses the GID by which peers reach a port, with its index in the table.
    ///
    /// On Ethernet the last entry that is set wins: RoCE v2 follows v1 for each address, and addresses
    /// that route (IPv4) follow the link-local one.
    ///
    /// # Errors
    ///
    /// `ENODATA` if the table is empty.
    pub(crate) fn preferred_gid(self, port: PortNum, link_layer: LinkLayer) -> Result<(u8, Gid)> {
        self.usable_gids(port, link_layer)
            .next()
            .ok_or_else(errno::nodata)
    }

    /// The entries of a port's GID table that are set, those that we prefer first.
    fn usable_gids(self, port: PortNum, link_layer: LinkLayer) -> impl Iterator<Item = (u8, Gid)> {
        let last = if link_layer == LinkLayer::Ethernet {
            15
        } else {
            0
        };
        let entry = move |i| Some((i, self.query_gid(port, i)?));
        (0..=last).rev().filter_map(entry)
    }

    /// Finds a GID of a port, with its index in the table; if it is there more than once, the entry that
    /// we prefer.
    ///
    /// # Errors
    ///
    /// `ENODATA` if the port does not have it.
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
        // SAFETY: By the type invariants, and `gid` may be written.
        let ret =
            unsafe { bindings::rdma_query_gid(self.as_raw(), port, c_int::from(index), &mut gid) };
        // SAFETY: Any bytes are a GID.
        let raw = unsafe { gid.raw };
        (ret == 0 && raw != [0; 16]).then_some(raw)
    }
}
