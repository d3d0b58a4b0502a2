// SPDX-License-Identifier: GPL-2.0

//! Work requests. Those of DC say to which target they go, and by which way.

use super::{target::Name, Hca};
use crate::{
    bindings,
    verbs::{
        address::AddressHandle,
        work::{Op, Sge},
    },
};
use core::marker::PhantomData;
use kernel::{error::to_result, prelude::*};

/// The way to a port.
pub(crate) struct Av(bindings::kite_mlx5_av);

impl Av {
    /// That where `route` leads to. On RoCE the neighbour may be looked up.
    ///
    /// # Errors
    ///
    /// What the RDMA core says of an unknown neighbour.
    pub(crate) fn new(hca: &Hca, route: &AddressHandle) -> Result<Self> {
        let mut av = bindings::kite_mlx5_av::default();
        let mut attr = route.raw_attr();
        // SAFETY: The hardware is open, and both may be written.
        to_result(unsafe { bindings::kite_mlx5_av_resolve(hca.as_raw(), &mut attr, &mut av) })?;
        Ok(Self(av))
    }

    pub(super) fn as_raw(&self) -> *const bindings::kite_mlx5_av {
        &self.0
    }
}

/// A target, and the way there.
pub(crate) struct Way {
    av: Av,
    name: Name,
}

impl Way {
    /// The target `name` at the port that `route` leads to.
    ///
    /// # Errors
    ///
    /// As of [`Av::new`].
    pub(crate) fn new(hca: &Hca, route: &AddressHandle, name: Name) -> Result<Self> {
        let av = Av::new(hca, route)?;
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
    /// What `op` says, at the end of a way.
    pub(crate) fn of(op: &Op<'a>, wr_id: u64, way: &'a Way) -> Self {
        let mut work = Self::connected(op, wr_id);
        work.raw.av = way.av.as_raw();
        work.raw.dc_key = way.name.key;
        work.raw.dctn = way.name.number;
        work
    }

    /// What `op` says, at the other end of an RC queue pair.
    pub(crate) fn connected(op: &Op<'a>, wr_id: u64) -> Self {
        let fence = match op.fenced {
            true => bindings::ib_send_flags_IB_SEND_FENCE,
            false => 0,
        };
        let (compare, swap_add) = op.verb.operands();
        Self {
            raw: bindings::kite_mlx5_wr {
                wr_id,
                opcode: op.verb.opcode(),
                send_flags: (bindings::ib_send_flags_IB_SEND_SIGNALED | fence) as c_int,
                sg_list: op.sges.as_ptr().cast(),
                num_sge: op.sges.len() as c_int,
                rkey: op.remote.key,
                remote_addr: op.remote.addr,
                compare,
                swap_add,
                ..Default::default()
            },
            _borrows: PhantomData,
        }
    }
}
