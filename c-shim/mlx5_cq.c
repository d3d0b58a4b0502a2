// SPDX-License-Identifier: GPL-2.0
/*
 * Completion queues.
 *
 * A CQE names its QP or DCT by number. Before a QP is reset, or a number is freed, its CQEs are
 * removed from the ring: they would be attributed to the next user of the number, and callers count
 * on the entries that they occupy.
 */
#include <linux/slab.h>

#include "mlx5_objects.h"

static struct mlx5_cqe64 *get_cqe(struct kite_mlx5_cq *cq, u32 i)
{
	return kite_mlx5_ring_entry(&cq->ring, i);
}

/* The owner bit that the hardware writes inverts with each pass over the ring. */
static bool is_cqe_valid(struct kite_mlx5_cq *cq, u32 i)
{
	const struct mlx5_cqe64 *cqe = get_cqe(cq, i);
	u8 op_own = READ_ONCE(cqe->op_own);

	return op_own >> 4 != MLX5_CQE_INVALID &&
	       (op_own & MLX5_CQE_OWNER_MASK) == !!(i & cq->ring.count);
}

static u8 cqe_opcode(const struct mlx5_cqe64 *cqe)
{
	return cqe->op_own >> 4;
}

static bool is_recv_cqe(const struct mlx5_cqe64 *cqe)
{
	switch (cqe_opcode(cqe)) {
	case MLX5_CQE_REQ:
	case MLX5_CQE_REQ_ERR:
		return false;
	default:
		return true;
	}
}

static bool is_error_cqe(const struct mlx5_cqe64 *cqe)
{
	u8 opcode = cqe_opcode(cqe);

	return opcode == MLX5_CQE_REQ_ERR || opcode == MLX5_CQE_RESP_ERR;
}

static u32 cqe_qpn(const struct mlx5_cqe64 *cqe)
{
	return be32_to_cpu(cqe->sop_drop_qpn) & QPN_MASK;
}

static enum ib_wc_status syndrome_to_status(u8 syndrome)
{
	switch (syndrome) {
	case MLX5_CQE_SYNDROME_LOCAL_LENGTH_ERR:
		return IB_WC_LOC_LEN_ERR;
	case MLX5_CQE_SYNDROME_LOCAL_QP_OP_ERR:
		return IB_WC_LOC_QP_OP_ERR;
	case MLX5_CQE_SYNDROME_LOCAL_PROT_ERR:
		return IB_WC_LOC_PROT_ERR;
	case MLX5_CQE_SYNDROME_WR_FLUSH_ERR:
		return IB_WC_WR_FLUSH_ERR;
	case MLX5_CQE_SYNDROME_BAD_RESP_ERR:
		return IB_WC_BAD_RESP_ERR;
	case MLX5_CQE_SYNDROME_LOCAL_ACCESS_ERR:
		return IB_WC_LOC_ACCESS_ERR;
	case MLX5_CQE_SYNDROME_REMOTE_INVAL_REQ_ERR:
		return IB_WC_REM_INV_REQ_ERR;
	case MLX5_CQE_SYNDROME_REMOTE_ACCESS_ERR:
		return IB_WC_REM_ACCESS_ERR;
	case MLX5_CQE_SYNDROME_REMOTE_OP_ERR:
		return IB_WC_REM_OP_ERR;
	case MLX5_CQE_SYNDROME_TRANSPORT_RETRY_EXC_ERR:
		return IB_WC_RETRY_EXC_ERR;
	case MLX5_CQE_SYNDROME_RNR_RETRY_EXC_ERR:
		return IB_WC_RNR_RETRY_EXC_ERR;
	case MLX5_CQE_SYNDROME_REMOTE_ABORTED_ERR:
		return IB_WC_REM_ABORT_ERR;
	default:
		return IB_WC_GENERAL_ERR;
	}
}

static void parse_error_cqe(const struct mlx5_cqe64 *cqe, struct kite_mlx5_wc *wc)
{
	const struct mlx5_err_cqe *error = (const struct mlx5_err_cqe *)cqe;

	wc->syndrome = error->syndrome;
	wc->vendor_syndrome = error->vendor_err_synd;
	wc->status = syndrome_to_status(error->syndrome);
}

static enum ib_wc_opcode wqe_to_wc_opcode(u8 opcode)
{
	switch (opcode) {
	case MLX5_OPCODE_RDMA_WRITE:
	case MLX5_OPCODE_RDMA_WRITE_IMM:
		return IB_WC_RDMA_WRITE;
	case MLX5_OPCODE_RDMA_READ:
		return IB_WC_RDMA_READ;
	case MLX5_OPCODE_ATOMIC_CS:
		return IB_WC_COMP_SWAP;
	case MLX5_OPCODE_ATOMIC_FA:
		return IB_WC_FETCH_ADD;
	default:
		return IB_WC_SEND;
	}
}

static void parse_send_cqe(const struct mlx5_cqe64 *cqe, struct kite_mlx5_wc *wc)
{
	wc->opcode = wqe_to_wc_opcode(be32_to_cpu(cqe->sop_drop_qpn) >> 24);
	wc->byte_len = be32_to_cpu(cqe->byte_cnt);
}

static void parse_recv_cqe(const struct mlx5_cqe64 *cqe, struct kite_mlx5_wc *wc)
{
	u8 opcode = cqe_opcode(cqe);

	wc->opcode = opcode == MLX5_CQE_RESP_WR_IMM ? IB_WC_RECV_RDMA_WITH_IMM : IB_WC_RECV;
	wc->with_imm = opcode == MLX5_CQE_RESP_WR_IMM || opcode == MLX5_CQE_RESP_SEND_IMM;
	wc->imm = cqe->immediate;
	wc->src_qp = be32_to_cpu(cqe->flags_rqpn) & QPN_MASK;
	wc->byte_len = be32_to_cpu(cqe->byte_cnt);
}

/* Returns the QP of a send CQE, or the RMP of a receive CQE. */
static void *find_owner(struct kite_mlx5_cq *cq, const struct mlx5_cqe64 *cqe)
{
	return xa_load(is_recv_cqe(cqe) ? &cq->recv_rmps : &cq->send_qps, cqe_qpn(cqe));
}

/* Releases the WQE of a CQE, and stores its wr_id. */
static bool complete_wqe(void *owner, const struct mlx5_cqe64 *cqe, u64 *wr_id)
{
	u16 counter = be16_to_cpu(cqe->wqe_counter);

	if (!owner)
		return false;
	return is_recv_cqe(cqe) ? kite_mlx5_rmp_free_entry(owner, counter, wr_id) :
				 kite_mlx5_complete_send(owner, counter, wr_id);
}

/*
 * Returns true if the next CQE can be consumed. A CQE without an owner may be of a DCT or QP whose
 * creation command has not returned its number yet.
 */
static bool has_next_cqe(struct kite_mlx5_cq *cq)
{
	const struct mlx5_cqe64 *cqe = get_cqe(cq, cq->mcq.cons_index);

	if (!is_cqe_valid(cq, cq->mcq.cons_index))
		return false;
	/* The owner bit is read before the rest of the CQE. */
	dma_rmb();
	return !atomic_read_acquire(&cq->pending_receivers) || find_owner(cq, cqe);
}

/* Consumes one CQE. Returns true if @wc has a completion for the caller. */
static bool consume_cqe(struct kite_mlx5_cq *cq, struct kite_mlx5_wc *wc)
{
	const struct mlx5_cqe64 *cqe = get_cqe(cq, cq->mcq.cons_index++);

	*wc = (struct kite_mlx5_wc) { .number = cqe_qpn(cqe), .status = IB_WC_SUCCESS };
	if (!complete_wqe(find_owner(cq, cqe), cqe, &wc->wr_id))
		return false;
	if (is_recv_cqe(cqe))
		parse_recv_cqe(cqe, wc);
	else
		parse_send_cqe(cqe, wc);
	if (is_error_cqe(cqe))
		parse_error_cqe(cqe, wc);
	return true;
}

/* A failed RNIC writes no CQEs. Flushes one WQE in flight in software. */
static bool flush_one(struct kite_mlx5_cq *cq, struct kite_mlx5_wc *wc)
{
	struct kite_mlx5_qp *qp;
	unsigned long number;
	u64 wr_id;

	xa_for_each(&cq->send_qps, number, qp) {
		if (!kite_mlx5_flush_send(qp, &wr_id))
			continue;
		*wc = (struct kite_mlx5_wc) {
			.wr_id = wr_id,
			.status = IB_WC_WR_FLUSH_ERR,
			.number = number,
		};
		return true;
	}
	return false;
}

int kite_mlx5_poll_cq(struct kite_mlx5_cq *cq, struct kite_mlx5_wc *wc, int count)
{
	unsigned long flags;
	int found = 0;
	u32 old_ci;

	spin_lock_irqsave(&cq->lock, flags);
	old_ci = cq->mcq.cons_index;
	while (found < count && has_next_cqe(cq))
		if (consume_cqe(cq, &wc[found]))
			found++;
	if (cq->mcq.cons_index != old_ci)
		mlx5_cq_set_ci(&cq->mcq);
	while (found < count && kite_mlx5_has_failed(cq->dev) && flush_one(cq, &wc[found]))
		found++;
	spin_unlock_irqrestore(&cq->lock, flags);
	if (found)
		return found;
	if (READ_ONCE(cq->overflowed))
		return -EIO;
	return kite_mlx5_has_failed(cq->dev) ? -ENODEV : 0;
}

void kite_mlx5_cq_arm(struct kite_mlx5_cq *cq)
{
	unsigned long flags;

	spin_lock_irqsave(&cq->lock, flags);
	mlx5_cq_arm(&cq->mcq, MLX5_CQ_DB_REQ_NOT, cq->dev->bfreg.up->map, cq->mcq.cons_index);
	spin_unlock_irqrestore(&cq->lock, flags);
}

/* The owner bit belongs to the slot of the ring, and is kept. */
static void copy_cqe(struct mlx5_cqe64 *to, const struct mlx5_cqe64 *from)
{
	u8 owner = to->op_own & MLX5_CQE_OWNER_MASK;

	*to = *from;
	to->op_own = (from->op_own & ~MLX5_CQE_OWNER_MASK) | owner;
}

/*
 * Moves the remaining CQEs towards the producer index, over those of @number, whose WQEs are
 * released. Returns the number of removed CQEs.
 */
static u32 compact_cqes(struct kite_mlx5_cq *cq, u32 number, bool recvs)
{
	u32 begin = cq->mcq.cons_index;
	u32 end = begin;
	u32 dropped = 0;
	u32 i;

	while (end - begin < cq->ring.count && is_cqe_valid(cq, end))
		end++;
	dma_rmb();
	for (i = end; i-- != begin;) {
		const struct mlx5_cqe64 *cqe = get_cqe(cq, i);
		u64 unused;

		if (is_recv_cqe(cqe) == recvs && cqe_qpn(cqe) == number) {
			/* WQEs of the send queue are released by the reset of their QP. */
			if (recvs)
				complete_wqe(find_owner(cq, cqe), cqe, &unused);
			dropped++;
		} else if (dropped) {
			copy_cqe(get_cqe(cq, i + dropped), cqe);
		}
	}
	return dropped;
}

static void clean_cqes(struct kite_mlx5_cq *cq, u32 number, bool recvs)
{
	unsigned long flags;

	spin_lock_irqsave(&cq->lock, flags);
	cq->mcq.cons_index += compact_cqes(cq, number, recvs);
	/* The moves are complete before the hardware sees the consumer index. */
	dma_wmb();
	mlx5_cq_set_ci(&cq->mcq);
	spin_unlock_irqrestore(&cq->lock, flags);
}

void kite_mlx5_cq_clean_sends(struct kite_mlx5_qp *qp)
{
	struct kite_mlx5_cq *cq = qp->init.send_cq;
	unsigned long flags;

	clean_cqes(cq, qp->qpn, false);
	/* Pollers flush from these tables after a device failure. */
	spin_lock_irqsave(&cq->lock, flags);
	qp->head = 0;
	qp->tail = 0;
	spin_unlock_irqrestore(&cq->lock, flags);
}

void kite_mlx5_cq_clean_recvs(struct kite_mlx5_cq *cq, u32 number)
{
	clean_cqes(cq, number, true);
}

static void on_completion(struct mlx5_core_cq *mcq, struct mlx5_eqe *eqe)
{
	struct kite_mlx5_cq *cq = container_of(mcq, struct kite_mlx5_cq, mcq);

	if (cq->comp_handler)
		cq->comp_handler(cq->context);
}

static void on_overflow(struct mlx5_core_cq *mcq, enum mlx5_event type)
{
	struct kite_mlx5_cq *cq = container_of(mcq, struct kite_mlx5_cq, mcq);

	WRITE_ONCE(cq->overflowed, true);
}

static int create_cq(struct kite_mlx5_cq *cq, u32 vector)
{
	struct mlx5_core_dev *mdev = cq->dev->mdev;
	struct kite_mlx5_ring *ring = &cq->ring;
	u32 out[MLX5_ST_SZ_DW(create_cq_out)] = {};
	int len = MLX5_ST_SZ_BYTES(create_cq_in) + ring->buf.npages * sizeof(__be64);
	void *in, *cqc;
	int eqn, err;

	err = mlx5_comp_eqn_get(mdev, vector % mlx5_comp_vectors_max(mdev), &eqn);
	if (err)
		return err;
	in = kvzalloc(len, GFP_KERNEL);
	if (!in)
		return -ENOMEM;
	cqc = MLX5_ADDR_OF(create_cq_in, in, cq_context);
	MLX5_SET(cqc, cqc, log_cq_size, ilog2(ring->count));
	MLX5_SET(cqc, cqc, cqe_sz, CQE_STRIDE_64);
	MLX5_SET(cqc, cqc, c_eqn_or_apu_element, eqn);
	MLX5_SET(cqc, cqc, uar_page, cq->dev->bfreg.up->index);
	MLX5_SET(cqc, cqc, log_page_size, ring->buf.page_shift - MLX5_ADAPTER_PAGE_SHIFT);
	MLX5_SET64(cqc, cqc, dbr_addr, ring->db.dma);
	mlx5_fill_page_frag_array(&ring->buf, (__be64 *)MLX5_ADDR_OF(create_cq_in, in, pas));
	err = mlx5_core_create_cq(mdev, &cq->mcq, in, len, out, sizeof(out));
	kvfree(in);
	return err;
}

static void init(struct kite_mlx5_cq *cq)
{
	u32 i;

	spin_lock_init(&cq->lock);
	xa_init(&cq->send_qps);
	xa_init(&cq->recv_rmps);
	for (i = 0; i < cq->ring.count; i++)
		get_cqe(cq, i)->op_own = MLX5_CQE_INVALID << 4;
	cq->mcq.set_ci_db = cq->ring.db.db;
	cq->mcq.arm_db = cq->ring.db.db + 1;
	cq->mcq.cqe_sz = sizeof(struct mlx5_cqe64);
	cq->mcq.comp = mlx5_add_cq_to_tasklet;
	cq->mcq.tasklet_ctx.comp = on_completion;
	cq->mcq.event = on_overflow;
}

struct kite_mlx5_cq *kite_mlx5_cq_create(struct kite_mlx5_dev *dev, u32 entries, u32 vector,
					 void (*comp_handler)(void *context), void *context)
{
	struct kite_mlx5_cq *cq;
	int err;

	if (!entries || entries > BIT(MLX5_CAP_GEN(dev->mdev, log_max_cq_sz)))
		return ERR_PTR(-EINVAL);
	cq = kzalloc_obj(*cq);
	if (!cq)
		return ERR_PTR(-ENOMEM);
	cq->dev = dev;
	cq->comp_handler = comp_handler;
	cq->context = context;
	err = kite_mlx5_ring_alloc(dev, &cq->ring, roundup_pow_of_two(entries),
				   sizeof(struct mlx5_cqe64));
	if (err)
		goto free;
	init(cq);
	err = create_cq(cq, vector);
	if (err)
		goto free_ring;
	return cq;

free_ring:
	kite_mlx5_ring_free(dev, &cq->ring);
free:
	kfree(cq);
	return ERR_PTR(err);
}

int kite_mlx5_cq_destroy(struct kite_mlx5_cq *cq)
{
	int err = mlx5_core_destroy_cq(cq->dev->mdev, &cq->mcq);

	if (err)
		return err;
	WARN_ON(!xa_empty(&cq->send_qps) || !xa_empty(&cq->recv_rmps));
	kite_mlx5_ring_free(cq->dev, &cq->ring);
	kfree(cq);
	return 0;
}
