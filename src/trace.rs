// SPDX-License-Identifier: GPL-2.0

//! The trace events of `c-shim/kite_trace.h`, as functions. One that nobody listens to costs a no-op.
//!
//! `kernel::tracepoint::declare_trace!` serves events of the kernel itself only.

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
            // SAFETY: The key is a tracepoint of this module, which lives as long as we do.
            let listened = unsafe {
                kernel::jump_label::static_branch_unlikely!(
                    $key,
                    kernel::bindings::tracepoint,
                    key
                )
            };
            if listened {
                // SAFETY: The arguments are plain values, of the types of the C declaration.
                unsafe { $fire($($arg),*) };
            }
        }
    )*};
}

events! {
    /// A read or write has ended.
    fn access(__tracepoint_kite_access, rust_do_trace_kite_access;
        write: bool, home: u32, region: u64, offset: u64, len: u64, result: i32);
    /// Bytes were set, or not.
    fn fill(__tracepoint_kite_fill, rust_do_trace_kite_fill;
        home: u32, region: u64, offset: u64, len: u64, result: i32);
    /// Bytes were copied between regions, or not.
    fn copy(__tracepoint_kite_copy, rust_do_trace_kite_copy;
        from_home: u32, from_region: u64, to_home: u32, to_region: u64, len: u64, result: i32);
    /// A region of this node was moved, or not, or a part of it.
    fn migrate(__tracepoint_kite_migrate, rust_do_trace_kite_migrate; region: u64, chunks: u32, result: i32);
    /// An atomic operation has ended.
    fn atomic(__tracepoint_kite_atomic, rust_do_trace_kite_atomic;
        home: u32, region: u64, offset: u64, result: i32);
    /// A lock was taken, or a barrier passed, or not.
    fn sync(__tracepoint_kite_sync, rust_do_trace_kite_sync;
        barrier: bool, home: u32, region: u64, number: u64, result: i32);
    /// Send requests are about to be posted.
    fn post(__tracepoint_kite_post, rust_do_trace_kite_post;
        node: u32, pair: u32, count: u32, inflight: u32);
    /// A part of a transfer is done again.
    fn retry(__tracepoint_kite_retry, rust_do_trace_kite_retry; node: u32, len: u64, status: u32);
    /// A queue pair was connected, or given up.
    fn qp_state(__tracepoint_kite_qp_state, rust_do_trace_kite_qp_state;
        node: u32, pair: u32, generation: u32, up: bool);
    /// A control request was answered, or gave up.
    fn ctrl_request(__tracepoint_kite_ctrl_request, rust_do_trace_kite_ctrl_request; node: u32, call: u64, result: i32);
    /// The view changed.
    fn view(__tracepoint_kite_view, rust_do_trace_kite_view; epoch: u64, members: u32, left: u32);
}
