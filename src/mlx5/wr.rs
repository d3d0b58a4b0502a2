// SPDX-License-Identifier: GPL-2.0

//! Work requests. A DC request carries the address vector and the identity of its DCT.

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

/// Address vector: hardware form of the path to a port.
pub(crate) struct AddressVector(bindings::kite_mlx5_av);

impl AddressVector {
    /// Resolves the address of an address handle. On RoCE, this may need neighbor resolution.
    ///
    /// # Errors
    ///
    /// Error of the RDMA core for an unknown neighbor.
    pub(crate) fn new(hca: &Mlx5Device, ah: &AddressHandle) -> Result<Self> {
        let mut av = bindings::kite_mlx5_av::default();
        let mut attr = ah.raw_attr();
        // SAFETY: The device is open. `attr` and `av` are valid for writes.
        to_result(unsafe { bindings::kite_mlx5_av_resolve(hca.as_raw(), &mut attr, &mut av) })?;
        Ok(Self(av))
    }

    pub(super) fn as_raw(&self) -> *const bindings::kite_mlx5_av {
        &self.0
    }
}

/// DCT and the path to its port.
pub(crate) struct DcAddress {
    av: AddressVector,
    dct: DctId,
}

impl DcAddress {
    /// Returns the address of `dct` at the port of `ah`.
    ///
    /// # Errors
    ///
    /// See [`AddressVector::new`].
    pub(crate) fn new(hca: &Mlx5Device, ah: &AddressHandle, dct: DctId) -> Result<Self> {
        let av = AddressVector::new(hca, ah)?;
        Ok(Self { av, dct })
    }
}

/// Work request, always signaled.
#[repr(transparent)]
pub(crate) struct Mlx5SendWr<'a> {
    raw: bindings::kite_mlx5_wr,
    _borrows: PhantomData<(&'a [Sge], &'a DcAddress)>,
}

impl<'a> Mlx5SendWr<'a> {
    /// Creates a DC request for `op` at `address`.
    pub(crate) fn new_dc(op: &RdmaOp<'a>, wr_id: u64, address: &'a DcAddress) -> Self {
        let mut wr = Self::new_rc(op, wr_id);
        wr.raw.av = address.av.as_raw();
        wr.raw.dc_key = address.dct.dc_key;
        wr.raw.dctn = address.dct.dctn;
        wr
    }

    /// Creates a request for `op` on a connected RC QP.
    pub(crate) fn new_rc(op: &RdmaOp<'a>, wr_id: u64) -> Self {
        let (compare, swap_add) = op.opcode.atomic_operands();
        Self {
            raw: bindings::kite_mlx5_wr {
                wr_id,
                opcode: op.opcode.ib_opcode(),
                send_flags: op.send_flags() as c_int,
                sg_list: op.sges.as_ptr().cast(),
                num_sge: op.sges.len() as c_int,
                imm: op.opcode.imm_data(),
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
