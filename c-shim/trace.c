// SPDX-License-Identifier: GPL-2.0
/* Defines the trace events of kite_trace.h, and the functions that fire them from Rust. */
#define CREATE_TRACE_POINTS
#define CREATE_RUST_TRACE_POINTS
#include "kite_trace.h"
