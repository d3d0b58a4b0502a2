// SPDX-License-Identifier: GPL-2.0 OR MIT
//! What kite does not have. Most of that is refused by the header already, since our contexts have no functions for it.
//!
//! Nobody looks at the arguments, so they are left out: by C's calling conventions it is the caller who clears them up.

use std::ffi::{c_int, c_void};

use crate::errno::{pointer, set, Errno};

const REFUSED: Errno = Errno(libc::EOPNOTSUPP);

/// Functions that make something.
macro_rules! make_nothing {
    ($($name:ident)*) => { $(
        #[no_mangle]
        extern "C" fn $name() -> *mut c_void {
            pointer(Err(REFUSED))
        }
    )* };
}

/// Functions that do something.
macro_rules! do_nothing {
    ($($name:ident)*) => { $(
        #[no_mangle]
        extern "C" fn $name() -> c_int {
            REFUSED.0
        }
    )* };
}

make_nothing! {
    ibv_create_srq ibv_create_ah ibv_create_ah_from_wc ibv_qp_to_qp_ex
    ibv_reg_dmabuf_mr ibv_import_device ibv_import_pd ibv_import_mr ibv_import_dm
}

do_nothing! {
    ibv_attach_mcast ibv_detach_mcast ibv_resize_cq ibv_query_ece ibv_set_ece ibv_init_ah_from_wc
    ibv_resolve_eth_l2_from_gid
}

/// `IBV_REREG_MR_ERR_INPUT`: the memory is still registered as before.
#[no_mangle]
extern "C" fn ibv_rereg_mr() -> c_int {
    set(REFUSED);
    -1
}

/// Data may come in any order.
#[no_mangle]
extern "C" fn ibv_query_qp_data_in_order() -> c_int {
    0
}
