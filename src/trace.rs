// SPDX-License-Identifier: GPL-2.0

//! Functions that fire the trace events of `c-shim/kite_trace.h`. A disabled event costs one no-op
//! instruction.
//!
//! `kernel::tracepoint::declare_trace!` supports only events of the kernel image, not of modules.

macro_rules! events {
    ($($(#[$doc:meta])* fn $name:ident($key:ident, $fire:ident; $($arg:ident: $ty:ty),*);)*) => {$(
        $(#[$doc])*
        #[inline(always)]
        pub(crate) fn $name($($arg: $ty),*) {
            #[expect(improper_ctypes, reason = "only the address of the tracepoint is taken")]
            extern "C" {
                static $key: kernel::bindings::tracepoint;
                fn $fire($($arg: $ty),*);
            }
            // SAFETY: The key is a tracepoint of this module, which exists for as long as code of the module
            // runs.
            let listened = unsafe {
                kernel::jump_label::static_branch_unlikely!(
                    $key,
                    kernel::bindings::tracepoint,
                    key
                )
            };
            if listened {
                // SAFETY: The arguments are integers of the types in the C declaration, and the function has
                // no other preconditions.
                unsafe { $fire($($arg),*) };
            }
        }
    )*};
}

events! {
    /// A read or write of a region completed.
    fn access(__tracepoint_kite_access, rust_do_trace_kite_access;
        write: bool, home: u32, region: u64, offset: u64, len: u64, result: i32);
    /// A fill completed.
    fn fill(__tracepoint_kite_fill, rust_do_trace_kite_fill;
        home: u32, region: u64, offset: u64, len: u64, result: i32);
    /// A copy between regions completed.
    fn copy(__tracepoint_kite_copy, rust_do_trace_kite_copy;
        from_home: u32, from_region: u64, to_home: u32, to_region: u64, len: u64, result: i32);
    /// A migration of a region of this node ended. After a failure, a part of the chunks may have moved.
    fn migrate(__tracepoint_kite_migrate, rust_do_trace_kite_migrate; region: u64, chunks: u32, result: i32);
    /// An atomic operation completed.
    fn atomic(__tracepoint_kite_atomic, rust_do_trace_kite_atomic;
        home: u32, region: u64, offset: u64, result: i32);
    /// An attempt to acquire a lock or pass a barrier ended.
    fn sync(__tracepoint_kite_sync, rust_do_trace_kite_sync;
        barrier: bool, home: u32, region: u64, number: u64, result: i32);
    /// Work requests are about to be posted; `inflight` includes them.
    fn post(__tracepoint_kite_post, rust_do_trace_kite_post;
        node: u32, conn: u32, count: u32, inflight: u32);
    /// A segment of a transfer is retried.
    fn retry(__tracepoint_kite_retry, rust_do_trace_kite_retry; node: u32, len: u64, status: u32);
    /// The QP of a connection became ready (`up`), or was dropped.
    fn qp_state(__tracepoint_kite_qp_state, rust_do_trace_kite_qp_state;
        node: u32, conn: u32, generation: u32, up: bool);
    /// A control request received its reply, or failed.
    fn ctrl_request(__tracepoint_kite_ctrl_request, rust_do_trace_kite_ctrl_request;
        node: u32, request_id: u64, result: i32);
    /// The view changed: `unreachable` of the members are unreachable, and `removed` nodes are not members any more.
    fn view(__tracepoint_kite_view, rust_do_trace_kite_view;
        epoch: u64, members: u32, unreachable: u32, removed: u32);
}
