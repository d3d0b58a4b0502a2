/* SPDX-License-Identifier: GPL-2.0 */
/* Connection, memory and requests that all cases of kite_fastreg.ko share. */
#ifndef _KITE_FASTREG_H
#define _KITE_FASTREG_H

#include <linux/completion.h>
#include <linux/scatterlist.h>

#include <rdma/ib_verbs.h>

#include "../common.h"
#include "../qp.h"

#define MAX_ENTRIES 16
#define LOCAL_BYTES (MAX_ENTRIES * PAGE_SIZE)
#define TIMEOUT_JIFFIES (30 * HZ)

/* A work request and its completion. */
struct request {
	struct ib_cqe cqe;
	struct completion done;
	struct ib_wc wc;
};

/* One side of the connection, with at most one request of each kind in flight. */
struct endpoint {
	struct ib_qp *qp;
	struct request send;
	struct request receive;
};

extern struct ib_device *device;
extern struct ib_pd *pd;
extern struct endpoint near, far;

/* The region over far's pages, which each case registers again, and the pages. */
extern struct ib_mr *mr;
extern struct scatterlist lent_sgl[MAX_ENTRIES];

/* Near's memory, of LOCAL_BYTES. */
extern u8 *local;

/* qp.c */
int connect(void);
int wait_qp_error(struct ib_qp *qp);
int post_reg_mr(int access);
int invalidate(void);
int post_send_with_inv(void);
int transfer(enum ib_wr_opcode opcode, u32 key, enum ib_wc_status expected);

#endif /* _KITE_FASTREG_H */
