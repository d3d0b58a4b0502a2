/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Trace events of kite, under events/kite in tracefs.
 *
 * TRACE_EVENT() is a macro of C. src/trace.rs fires the events from Rust.
 */
#undef TRACE_SYSTEM
#define TRACE_SYSTEM kite

#if !defined(_KITE_TRACE_H) || defined(TRACE_HEADER_MULTI_READ)
#define _KITE_TRACE_H

#include <linux/tracepoint.h>

#include "wc_status.h"

/* A read or write has ended. */
TRACE_EVENT(kite_access,
	TP_PROTO(bool write, u32 home, u64 region, u64 offset, u64 len, s32 result),
	TP_ARGS(write, home, region, offset, len, result),
	TP_STRUCT__entry(
		__field(bool, write)
		__field(u32, home)
		__field(u64, region)
		__field(u64, offset)
		__field(u64, len)
		__field(s32, result)
	),
	TP_fast_assign(
		__entry->write = write;
		__entry->home = home;
		__entry->region = region;
		__entry->offset = offset;
		__entry->len = len;
		__entry->result = result;
	),
	TP_printk("%s home=%u region=%llu offset=%llu len=%llu result=%d",
		  __entry->write ? "write" : "read", __entry->home, __entry->region,
		  __entry->offset, __entry->len, __entry->result)
);

/* A fill has ended. */
TRACE_EVENT(kite_fill,
	TP_PROTO(u32 home, u64 region, u64 offset, u64 len, s32 result),
	TP_ARGS(home, region, offset, len, result),
	TP_STRUCT__entry(
		__field(u32, home)
		__field(u64, region)
		__field(u64, offset)
		__field(u64, len)
		__field(s32, result)
	),
	TP_fast_assign(
		__entry->home = home;
		__entry->region = region;
		__entry->offset = offset;
		__entry->len = len;
		__entry->result = result;
	),
	TP_printk("home=%u region=%llu offset=%llu len=%llu result=%d",
		  __entry->home, __entry->region, __entry->offset, __entry->len,
		  __entry->result)
);

/* A copy between regions has ended. */
TRACE_EVENT(kite_copy,
	TP_PROTO(u32 from_home, u64 from_region, u32 to_home, u64 to_region, u64 len, s32 result),
	TP_ARGS(from_home, from_region, to_home, to_region, len, result),
	TP_STRUCT__entry(
		__field(u32, from_home)
		__field(u64, from_region)
		__field(u32, to_home)
		__field(u64, to_region)
		__field(u64, len)
		__field(s32, result)
	),
	TP_fast_assign(
		__entry->from_home = from_home;
		__entry->from_region = from_region;
		__entry->to_home = to_home;
		__entry->to_region = to_region;
		__entry->len = len;
		__entry->result = result;
	),
	TP_printk("from home=%u region=%llu to home=%u region=%llu len=%llu result=%d",
		  __entry->from_home, __entry->from_region, __entry->to_home,
		  __entry->to_region, __entry->len, __entry->result)
);

/* A migration of a region of this node has ended; after an error a part of the chunks has moved. */
TRACE_EVENT(kite_migrate,
	TP_PROTO(u64 region, u32 chunks, s32 result),
	TP_ARGS(region, chunks, result),
	TP_STRUCT__entry(
		__field(u64, region)
		__field(u32, chunks)
		__field(s32, result)
	),
	TP_fast_assign(
		__entry->region = region;
		__entry->chunks = chunks;
		__entry->result = result;
	),
	TP_printk("region=%llu chunks=%u result=%d",
		  __entry->region, __entry->chunks, __entry->result)
);

/* An atomic operation has ended. */
TRACE_EVENT(kite_atomic,
	TP_PROTO(u32 home, u64 region, u64 offset, s32 result),
	TP_ARGS(home, region, offset, result),
	TP_STRUCT__entry(
		__field(u32, home)
		__field(u64, region)
		__field(u64, offset)
		__field(s32, result)
	),
	TP_fast_assign(
		__entry->home = home;
		__entry->region = region;
		__entry->offset = offset;
		__entry->result = result;
	),
	TP_printk("home=%u region=%llu offset=%llu result=%d",
		  __entry->home, __entry->region, __entry->offset, __entry->result)
);

/* A wait for a lock or a barrier has ended. */
TRACE_EVENT(kite_sync,
	TP_PROTO(bool barrier, u32 home, u64 region, u64 number, s32 result),
	TP_ARGS(barrier, home, region, number, result),
	TP_STRUCT__entry(
		__field(bool, barrier)
		__field(u32, home)
		__field(u64, region)
		__field(u64, number)
		__field(s32, result)
	),
	TP_fast_assign(
		__entry->barrier = barrier;
		__entry->home = home;
		__entry->region = region;
		__entry->number = number;
		__entry->result = result;
	),
	TP_printk("%s home=%u region=%llu number=%llu result=%d",
		  __entry->barrier ? "barrier" : "lock", __entry->home, __entry->region,
		  __entry->number, __entry->result)
);

/* Work requests are about to be posted; inflight includes them. */
TRACE_EVENT(kite_post,
	TP_PROTO(u32 node, u32 conn, u32 count, u32 inflight),
	TP_ARGS(node, conn, count, inflight),
	TP_STRUCT__entry(
		__field(u32, node)
		__field(u32, conn)
		__field(u32, count)
		__field(u32, inflight)
	),
	TP_fast_assign(
		__entry->node = node;
		__entry->conn = conn;
		__entry->count = count;
		__entry->inflight = inflight;
	),
	TP_printk("node=%u conn=%u count=%u inflight=%u",
		  __entry->node, __entry->conn, __entry->count, __entry->inflight)
);

/* Symbols of the status of kite_retry, for programs that read its format. */
TRACE_DEFINE_ENUM(KITE_WC_FLUSHED);
TRACE_DEFINE_ENUM(KITE_WC_RETRY_EXCEEDED);
TRACE_DEFINE_ENUM(KITE_WC_REMOTE_ERROR);
TRACE_DEFINE_ENUM(KITE_WC_LOCAL_ERROR);
TRACE_DEFINE_ENUM(KITE_WC_RNR_RETRY_EXCEEDED);
TRACE_DEFINE_ENUM(KITE_WC_TIMED_OUT);

/* A segment of a transfer failed with its QP and is retried. */
TRACE_EVENT(kite_retry,
	TP_PROTO(u32 node, u64 len, u32 status),
	TP_ARGS(node, len, status),
	TP_STRUCT__entry(
		__field(u32, node)
		__field(u64, len)
		__field(u32, status)
	),
	TP_fast_assign(
		__entry->node = node;
		__entry->len = len;
		__entry->status = status;
	),
	TP_printk("node=%u len=%llu status=%s", __entry->node, __entry->len,
		  __print_symbolic(__entry->status,
				   { KITE_WC_FLUSHED, "flushed" },
				   { KITE_WC_RETRY_EXCEEDED, "retry exceeded" },
				   { KITE_WC_REMOTE_ERROR, "remote error" },
				   { KITE_WC_LOCAL_ERROR, "local error" },
				   { KITE_WC_RNR_RETRY_EXCEEDED, "RNR retry exceeded" },
				   { KITE_WC_TIMED_OUT, "timed out" }))
);

/* An RC QP was connected or disconnected. */
TRACE_EVENT(kite_qp_state,
	TP_PROTO(u32 node, u32 conn, u32 generation, bool up),
	TP_ARGS(node, conn, generation, up),
	TP_STRUCT__entry(
		__field(u32, node)
		__field(u32, conn)
		__field(u32, generation)
		__field(bool, up)
	),
	TP_fast_assign(
		__entry->node = node;
		__entry->conn = conn;
		__entry->generation = generation;
		__entry->up = up;
	),
	TP_printk("node=%u conn=%u generation=%u %s", __entry->node, __entry->conn,
		  __entry->generation, __entry->up ? "up" : "down")
);

/* A control request to another node has ended. */
TRACE_EVENT(kite_ctrl_request,
	TP_PROTO(u32 node, u64 request_id, s32 result),
	TP_ARGS(node, request_id, result),
	TP_STRUCT__entry(
		__field(u32, node)
		__field(u64, request_id)
		__field(s32, result)
	),
	TP_fast_assign(
		__entry->node = node;
		__entry->request_id = request_id;
		__entry->result = result;
	),
	TP_printk("node=%u request_id=%llu result=%d", __entry->node, __entry->request_id,
		  __entry->result)
);

/* The view changed. */
TRACE_EVENT(kite_view,
	TP_PROTO(u64 epoch, u32 members, u32 unreachable, u32 removed),
	TP_ARGS(epoch, members, unreachable, removed),
	TP_STRUCT__entry(
		__field(u64, epoch)
		__field(u32, members)
		__field(u32, unreachable)
		__field(u32, removed)
	),
	TP_fast_assign(
		__entry->epoch = epoch;
		__entry->members = members;
		__entry->unreachable = unreachable;
		__entry->removed = removed;
	),
	TP_printk("epoch=%llu members=%u unreachable=%u removed=%u", __entry->epoch,
		  __entry->members, __entry->unreachable, __entry->removed)
);

#endif /* _KITE_TRACE_H */

#undef TRACE_INCLUDE_PATH
#define TRACE_INCLUDE_PATH .
#undef TRACE_INCLUDE_FILE
#define TRACE_INCLUDE_FILE kite_trace
#include <trace/define_trace.h>
