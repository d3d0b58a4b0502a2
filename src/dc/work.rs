// SPDX-License-Identifier: GPL-2.0

//! Work requests of DC: each says to which target it goes, and by which way.

use super::{target::Name, Hca};
use crate::{
    bindings,
    verbs::{
        address::AddressHandle,
        work::{Remote, Sge},
    },
};
use core::marker::PhantomData;
use kernel::{error::to_result, prelude::*};

/// A target, and the way there.
pub(crate) struct Way {
    av: bindings::kite_mlx5_av,
    name: Name,
}

impl Way {
    /// The target `name` at the port that `route` leads to. On RoCE the neighbour may be looked up.
    ///
    /// # Errors
    ///
    /// What the RDMA core says of an unknown neighbour.
    pub(crate) fn new(hca: &Hca, route: &AddressHandle, name: Name) -> Result<Self> {
        let mut av = bindings::kite_mlx5_av::default();
        let mut attr = route.raw_attr();
        // SAFETY: The hardware is open, and both may be written.
        to_result(unsafe { bindings::kite_mlx5_av_resolve(hca.as_raw(), &mut attr, &mut av) })?;
        Ok(Self { av, name })
    }
}

/// A request, always signalled.
#[repr(transparent)]
pub(crate) struct Work<'a> {
    raw: bindings::kite_mlx5_wr,
    _borrows: PhantomData<(&'a [Sge], &'a Way)>,
}

impl<'a> Work<'a> {
    fn new(
        opcode: bindings::ib_wr_opcode,
        wr_id: u64,
        sges: &'a [Sge],
        way: &'a Way,
        remote: Remote,
    ) -> Self {
        Self {
            raw: bindings::kite_mlx5_wr {
                wr_id,
                opcode,
                send_flags: bindings::ib_send_flags_IB_SEND_SIGNALED as c_int,
                sg_list: sges.as_ptr().cast(),
                num_sge: sges.len() as c_int,
                rkey: remote.key,
                remote_addr: remote.addr,
                av: &way.av,
                dc_key: way.name.key,
                dctn: way.name.number,
                ..Default::default()
            },
            _borrows: PhantomData,
        }
    }

    /// Begins only when all reads and atomic operations that were posted before have ended.
    pub(crate) fn fenced(mut self) -> Self {
        self.raw.send_flags |= bindings::ib_send_flags_IB_SEND_FENCE as c_int;
        self
    }

    /// Reads the target's memory.
    pub(crate) fn read(wr_id: u64, sges: &'a [Sge], way: &'a Way, remote: Remote) -> Self {
        let opcode = bindings::ib_wr_opcode_IB_WR_RDMA_READ;
        Self::new(opcode, wr_id, sges, way, remote)
    }

    /// Writes local memory to the target's.
    pub(crate) fn write(wr_id: u64, sges: &'a [Sge], way: &'a Way, remote: Remote) -> Self {
        let opcode = bindings::ib_wr_opcode_IB_WR_RDMA_WRITE;
        Self::new(opcode, wr_id, sges, way, remote)
    }

    /// Sends to the target's pool.
    pub(crate) fn send(wr_id: u64, sges: &'a [Sge], way: &'a Way) -> Self {
        let opcode = bindings::ib_wr_opcode_IB_WR_SEND;
        Self::new(opcode, wr_id, sges, way, Remote { addr: 0, key: 0 })
    }

    /// Puts `new` where `expected` is, in 8 bytes of the target's memory, and what was there in local memory.
    pub(crate) fn compare_swap(
        wr_id: u64,
        sges: &'a [Sge],
        way: &'a Way,
        remote: Remote,
        (expected, new): (u64, u64),
    ) -> Self {
        let opcode = bindings::ib_wr_opcode_IB_WR_ATOMIC_CMP_AND_SWP;
        let mut work = Self::new(opcode, wr_id, sges, way, remote);
        (work.raw.compare, work.raw.swap_add) = (expected, new);
        work
    }

    /// Adds to 8 bytes of the target's memory, and puts what was there in local memory.
    pub(crate) fn fetch_add(
        wr_id: u64,
        sges: &'a [Sge],
        way: &'a Way,
        remote: Remote,
        operand: u64,
    ) -> Self {
        let opcode = bindings::ib_wr_opcode_IB_WR_ATOMIC_FETCH_AND_ADD;
        let mut work = Self::new(opcode, wr_id, sges, way, remote);
        work.raw.swap_add = operand;
        work
    }
}
