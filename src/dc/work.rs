// SPDX-License-Identifier: GPL-2.0

//! Work requests of DC: each says to which target it goes, and by which way.

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
    /// What `op` says, at the end of a way.
    pub(crate) fn of(op: &Op<'a>, wr_id: u64, way: &'a Way) -> Self {
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
                av: &way.av,
                dc_key: way.name.key,
                dctn: way.name.number,
                ..Default::default()
            },
            _borrows: PhantomData,
        }
    }
}
