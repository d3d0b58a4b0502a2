// SPDX-License-Identifier: GPL-2.0

//! Work requests. Those of DC say to which target they go, and by which way.

use super::{dct::DctId, Mlx5Device};
use crate::{
    bindings,
    verbs::{
        address::AddressHandle,
        work::{RdmaOp, Sge},
    },
};
use core::marker::PhantomData;
use kernel::{error::to_result, prelude::*};

/// The way to a port.
pub(crate) struct AddressVector(bindings::kite_mlx5_av);

impl AddressVector {
    /// That where `route` leads to. On RoCE the neighbour may be looked up.
    ///
    /// # Errors
    ///
    /// What the RDMA core says of an unknown neighbour.
    pub(crate) fn new(hca: &Mlx5Device, ah: &AddressHandle) -> Result<Self> {
        let mut av = bindings::kite_mlx5_av::default();
        let mut attr = ah.raw_attr();
        // SAFETY: The hardware is open, and both may be written.
        to_result(unsafe { bindings::kite_mlx5_av_resolve(hca.as_raw(), &mut attr, &mut av) })?;
        Ok(Self(av))
    }

    pub(super) fn as_raw(&self) -> *const bindings::kite_mlx5_av {
        &self.0
    }
}

/// A target, and the way there.
pub(crate) struct DcAddress {
    av: AddressVector,
    dct: DctId,
}

impl DcAddress {
    /// The target `name` at the port that `route` leads to.
    ///
    /// # Errors
    ///
    /// As of [`Av::new`].
    pub(crate) fn new(hca: &Mlx5Device, ah: &AddressHandle, dct: DctId) -> Result<Self> {
        let av = AddressVector::new(hca, ah)?;
        Ok(Self { av, dct })
    }
}

/// A request, always signalled.
#[repr(transparent)]
pub(crate) struct Mlx5SendWr<'a> {
    raw: bindings::kite_mlx5_wr,
    _borrows: PhantomData<(&'a [Sge], &'a DcAddress)>,
}

impl<'a> Mlx5SendWr<'a> {
    /// What `op` says, at the end of a way.
    pub(crate) fn new_dc(op: &RdmaOp<'a>, wr_id: u64, address: &'a DcAddress) -> Self {
        let mut wr = Self::new_rc(op, wr_id);
        wr.raw.av = address.av.as_raw();
        wr.raw.dc_key = address.dct.dc_key;
        wr.raw.dctn = address.dct.dctn;
        wr
    }

    /// What `op` says, at the other end of an RC queue pair.
    pub(crate) fn new_rc(op: &RdmaOp<'a>, wr_id: u64) -> Self {
        let fence = match op.fence {
            true => bindings::ib_send_flags_IB_SEND_FENCE,
            false => 0,
        };
        let (compare, swap_add) = op.opcode.atomic_operands();
        Self {
            raw: bindings::kite_mlx5_wr {
                wr_id,
                opcode: op.opcode.ib_opcode(),
                send_flags: (bindings::ib_send_flags_IB_SEND_SIGNALED | fence) as c_int,
                sg_list: op.sges.as_ptr().cast(),
                num_sge: op.sges.len() as c_int,
                rkey: op.remote.rkey,
                remote_addr: op.remote.addr,
                compare,
                swap_add,
                ..Default::default()
            },
            _borrows: PhantomData,
        }
    }
}
