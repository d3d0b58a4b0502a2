/* SPDX-License-Identifier: GPL-2.0 */
/* Transports of kite_latency.ko: each moves a buffer to the memory of the other RNIC, and back. */
#ifndef _KITE_LATENCY_H
#define _KITE_LATENCY_H

#include <linux/types.h>

/**
 * struct transport_ops - one transport.
 * @open: prepares transfers of @size bytes at @buf, between the RNICs of two network devices.
 * @transfer: transfers all bytes, and returns when the transfer has completed.
 * @close: releases the resources that @open acquired, also after @open failed.
 */
struct transport_ops {
	const char *name;
	int (*open)(const char *from, const char *to, void *buf, size_t size);
	int (*transfer)(bool write);
	void (*close)(void);
};

extern const struct transport_ops verbs_ops;

#endif /* _KITE_LATENCY_H */
