// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Functions that kite does not support. The header rejects most of these itself, since the contexts of this library
//! lack the functions.
//!
//! The arguments are not used, so they are not declared: in the C calling convention the caller removes them.

use std::ffi::{c_int, c_void};

use crate::errno::{ptr_or_null, zero_or_minus_one, Errno};

pub(crate) const UNSUPPORTED: Errno = Errno(libc::EOPNOTSUPP);

/// Functions that create an object.
macro_rules! return_null {
    ($($name:ident)*) => { $(
        #[no_mangle]
        extern "C" fn $name() -> *mut c_void {
            ptr_or_null(Err(UNSUPPORTED))
        }
    )* };
}

/// Functions that return an errno.
macro_rules! return_errno {
    ($($name:ident)*) => { $(
        #[no_mangle]
        extern "C" fn $name() -> c_int {
            UNSUPPORTED.0
        }
    )* };
}

/// Functions that return -1.
macro_rules! return_minus_one {
    ($($name:ident)*) => { $(
        #[no_mangle]
        extern "C" fn $name() -> c_int {
            zero_or_minus_one(Err(UNSUPPORTED))
        }
    )* };
}

return_null! {
    ibv_create_srq ibv_create_ah ibv_create_ah_from_wc ibv_qp_to_qp_ex
    ibv_reg_dmabuf_mr ibv_import_device ibv_import_pd ibv_import_mr ibv_import_dm
}

return_errno! {
    ibv_attach_mcast ibv_detach_mcast ibv_resize_cq ibv_query_ece ibv_set_ece ibv_init_ah_from_wc
    ibv_resolve_eth_l2_from_gid
}

// Sockets of librdmacm depend on private parts of its identifiers.
return_minus_one! {
    rdma_create_qp_ex rdma_create_srq rdma_create_srq_ex rdma_join_multicast rdma_join_multicast_ex
    rdma_leave_multicast rdma_reject_ece rdma_set_local_ece rdma_get_remote_ece rsocket
}

// `IBV_REREG_MR_ERR_INPUT`: the memory region is unchanged.
return_minus_one! { ibv_rereg_mr }

/// Returns 0: data may be placed in any order.
#[no_mangle]
extern "C" fn ibv_query_qp_data_in_order() -> c_int {
    0
}
