/* SPDX-License-Identifier: GPL-2.0 */
/* What kite_latency.ko times: one way to move a buffer to the other RNIC's memory, and back. */
#ifndef _KITE_LATENCY_H
#define _KITE_LATENCY_H

#include <linux/types.h>

/**
 * struct transport_ops - one way to do it.
 * @open: gets ready to move @size bytes at @buf, between the RNICs of two network devices.
 * @transfer: moves them all, and returns when that is done.
 * @close: gives back what @open took, also after it failed.
 */
struct transport_ops {
	const char *name;
	int (*open)(const char *from, const char *to, void *buf, size_t size);
	int (*transfer)(bool write);
	void (*close)(void);
};

extern const struct transport_ops verbs_ops;

#endif /* _KITE_LATENCY_H */
