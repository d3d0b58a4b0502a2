/* SPDX-License-Identifier: GPL-2.0 OR MIT */
/*
 * What bindgen reads: the ABI, and its request numbers as constants, since bindgen cannot evaluate
 * the macros that make them.
 */
#include "../../include/uapi/kite.h"

#define NUMBER(name) static const __u32 name##_NR = name

NUMBER(KITE_IOC_BIND);
NUMBER(KITE_IOC_ALLOC);
NUMBER(KITE_IOC_MAP);
NUMBER(KITE_IOC_UNMAP);
NUMBER(KITE_IOC_FREE);
NUMBER(KITE_IOC_READ);
NUMBER(KITE_IOC_WRITE);
NUMBER(KITE_IOC_REGION);
NUMBER(KITE_IOC_LIST);
NUMBER(KITE_IOC_EVENT);
NUMBER(KITE_IOC_ATOMIC);
NUMBER(KITE_IOC_SERVE);
NUMBER(KITE_IOC_CALL);
NUMBER(KITE_IOC_RECEIVE);
NUMBER(KITE_IOC_REPLY);
NUMBER(KITE_IOC_REPLY_RECEIVE);
NUMBER(KITE_IOC_NODES);
NUMBER(KITE_IOC_RNIC);
NUMBER(KITE_IOC_STATS);
NUMBER(KITE_IOC_JOIN);
NUMBER(KITE_IOC_VIEW);

/* Where a request number holds the size of its structure. */
static const __u32 SIZE_SHIFT = _IOC_SIZESHIFT;
static const __u32 SIZE_MASK = _IOC_SIZEMASK;
