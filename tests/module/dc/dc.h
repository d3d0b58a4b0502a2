/* SPDX-License-Identifier: GPL-2.0 */
/* Endpoints, memory and work requests that all cases of kite_dc.ko share. */
#ifndef _KITE_DC_H
#define _KITE_DC_H

#include <linux/completion.h>
#include <linux/time64.h>

#include "mlx5.h"

#include "../common.h"

#define PORT 1
#define DC_KEY 0x1122334455667788ull
#define ACCESS (IB_ACCESS_LOCAL_WRITE | IB_ACCESS_REMOTE_READ | IB_ACCESS_REMOTE_WRITE | \
		IB_ACCESS_REMOTE_ATOMIC)
#define MEMORY_BYTES (8 * PAGE_SIZE)
#define NUM_RECVS 15
#define RECV_BYTES 1000
/* WQEBBs of a send queue: more than a page. */
#define MAX_WQEBBS 256
#define BATCH 8
#define TIMEOUT_NS (30 * NSEC_PER_SEC)
#define TIMEOUT_JIFFIES (30 * HZ)
#define NUM_DCTS 3

/**
 * struct endpoint - one RNIC, with targets and a queue pair of each kind.
 * @key: key to @memory.
 * @memory: memory that remote requests access, of MEMORY_BYTES.
 * @addr: DMA address of @memory.
 * @interrupt: completed by each event of @send_cq.
 */
struct endpoint {
	struct ib_device *ibdev;
	struct ib_pd *pd;
	struct kite_mlx5_dev *dev;
	u32 key;
	u8 *memory;
	dma_addr_t addr;
	struct completion interrupt;
	struct kite_mlx5_cq *send_cq;
	struct kite_mlx5_cq *recv_cq;
	struct kite_mlx5_rmp *rmp;
	struct kite_mlx5_dct *dct[NUM_DCTS];
	struct kite_mlx5_qp *dci;
	struct kite_mlx5_qp *rc;
};

/* The sender and the receiver of all cases. */
extern struct endpoint near, far;

/* Address vectors from near to far and back. */
extern struct kite_mlx5_av av_to_far, av_to_near;

/* The queue pair of near that the cases use. */
extern struct kite_mlx5_qp *qp;

/* work.c: the first half of near's memory is sent, the other half is received into. */
u8 *source(void);
u8 *result(void);
u8 *receive_buffer(u64 i);
struct ib_sge from_source(u32 offset, u32 length);
struct ib_sge into_result(u32 length);
void fill(u8 seed);
int post_receive(u64 i);
int post_receives(void);
struct kite_mlx5_wr request(enum ib_wr_opcode opcode, const struct ib_sge *sge, int count);
int post(const struct kite_mlx5_wr *wr, int count);
int wait_wc(struct kite_mlx5_cq *cq, struct kite_mlx5_wc *wc);
int expect_wc(enum ib_wc_status status, u64 wr_id);
int run(const struct kite_mlx5_wr *wr);

/* main.c */
struct kite_mlx5_dct *create_dct(struct endpoint *end);
int restart(void);

/* transfers.c: cases of any queue pair. */
extern const struct test transfer_tests[];
int write_and_read(void);
int messages(void);

/* errors.c: cases of any queue pair that end with it in RTS again, and cases of DC. */
extern const struct test error_tests[];
extern const struct test dc_tests[];

#endif /* _KITE_DC_H */
