// SPDX-License-Identifier: GPL-2.0
/* Makes the trace events of kite_trace.h, and the functions by which Rust fires them. */
#define CREATE_TRACE_POINTS
#define CREATE_RUST_TRACE_POINTS
#include "kite_trace.h"
