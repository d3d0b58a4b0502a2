// SPDX-License-Identifier: GPL-2.0
/*
 * Work queue entries: segments of 16 bytes in basic blocks (WQEBB) of 64 bytes.
 *
 * A WQE is built in a buffer and copied block by block, since the ring may wrap around between any
 * two blocks.
 */
#include "mlx5_objects.h"

#define MAX_WQE_BYTES (KITE_MLX5_MAX_WR_WQEBBS * MLX5_SEND_WQE_BB)

struct wqe {
	u8 bytes[MAX_WQE_BYTES] __aligned(8);
	u32 len;
};

/* Reserves a segment of @len bytes. Returns NULL if the WQE is full. */
static void *append_seg(struct wqe *wqe, u32 len)
{
	void *at = wqe->bytes + wqe->len;

	len = ALIGN(len, 16);
	if (len > MAX_WQE_BYTES - wqe->len)
		return NULL;
	wqe->len += len;
	return at;
}

static int wqe_opcode(const struct kite_mlx5_wr *wr)
{
	switch (wr->opcode) {
	case IB_WR_SEND:
		return MLX5_OPCODE_SEND;
	case IB_WR_SEND_WITH_IMM:
		return MLX5_OPCODE_SEND_IMM;
	case IB_WR_RDMA_WRITE:
		return MLX5_OPCODE_RDMA_WRITE;
	case IB_WR_RDMA_WRITE_WITH_IMM:
		return MLX5_OPCODE_RDMA_WRITE_IMM;
	case IB_WR_RDMA_READ:
		return MLX5_OPCODE_RDMA_READ;
	case IB_WR_ATOMIC_CMP_AND_SWP:
		return MLX5_OPCODE_ATOMIC_CS;
	case IB_WR_ATOMIC_FETCH_AND_ADD:
		return MLX5_OPCODE_ATOMIC_FA;
	default:
		return -EINVAL;
	}
}

static bool is_atomic(const struct kite_mlx5_wr *wr)
{
	return wr->opcode == IB_WR_ATOMIC_CMP_AND_SWP || wr->opcode == IB_WR_ATOMIC_FETCH_AND_ADD;
}

static bool is_send(const struct kite_mlx5_wr *wr)
{
	return wr->opcode == IB_WR_SEND || wr->opcode == IB_WR_SEND_WITH_IMM;
}

static bool has_imm(const struct kite_mlx5_wr *wr)
{
	return wr->opcode == IB_WR_SEND_WITH_IMM || wr->opcode == IB_WR_RDMA_WRITE_WITH_IMM;
}

static void put_datagram_seg(struct wqe *wqe, const struct kite_mlx5_wr *wr)
{
	struct mlx5_wqe_datagram_seg *segment = append_seg(wqe, sizeof(*segment));

	memcpy(&segment->av, wr->av, sizeof(segment->av));
	segment->av.key.dc_key = cpu_to_be64(wr->dc_key);
	segment->av.dqp_dct = cpu_to_be32(wr->dctn | MLX5_EXTENDED_UD_AV);
}

static void put_raddr_seg(struct wqe *wqe, const struct kite_mlx5_wr *wr)
{
	struct mlx5_wqe_raddr_seg *segment = append_seg(wqe, sizeof(*segment));

	segment->raddr = cpu_to_be64(wr->remote_addr);
	segment->rkey = cpu_to_be32(wr->rkey);
	segment->reserved = 0;
}

static void put_atomic_seg(struct wqe *wqe, const struct kite_mlx5_wr *wr)
{
	struct mlx5_wqe_atomic_seg *segment = append_seg(wqe, sizeof(*segment));
	bool compares = wr->opcode == IB_WR_ATOMIC_CMP_AND_SWP;

	segment->swap_add = cpu_to_be64(wr->swap_add);
	segment->compare = compares ? cpu_to_be64(wr->compare) : 0;
}

/* A data segment of length 0 means 2 GiB to the hardware: -EINVAL. */
static int put_data_segs(struct wqe *wqe, const struct kite_mlx5_wr *wr)
{
	struct mlx5_wqe_data_seg *segment;
	int i;

	for (i = 0; i < wr->num_sge; i++) {
		if (!wr->sg_list[i].length)
			continue;
		segment = append_seg(wqe, sizeof(*segment));
		if (!segment || wr->sg_list[i].length > S32_MAX)
			return -EINVAL;
		segment->byte_count = cpu_to_be32(wr->sg_list[i].length);
		segment->lkey = cpu_to_be32(wr->sg_list[i].lkey);
		segment->addr = cpu_to_be64(wr->sg_list[i].addr);
	}
	return 0;
}

/* Copies the data into the WQE. The addresses are kernel virtual addresses. */
static int put_inline_seg(struct wqe *wqe, const struct kite_mlx5_wr *wr)
{
	struct mlx5_wqe_inline_seg *segment;
	u32 total = 0;
	u8 *to;
	int i;

	for (i = 0; i < wr->num_sge; i++) {
		if (wr->sg_list[i].length > MAX_WQE_BYTES - total)
			return -EINVAL;
		total += wr->sg_list[i].length;
	}
	if (!total)
		return 0;
	segment = append_seg(wqe, sizeof(*segment) + total);
	if (!segment)
		return -EINVAL;
	segment->byte_count = cpu_to_be32(total | MLX5_INLINE_SEG);
	to = (u8 *)(segment + 1);
	for (i = 0; i < wr->num_sge; i++) {
		memcpy(to, (void *)(uintptr_t)wr->sg_list[i].addr, wr->sg_list[i].length);
		to += wr->sg_list[i].length;
	}
	return 0;
}

static int put_data(struct wqe *wqe, const struct kite_mlx5_wr *wr)
{
	if (is_atomic(wr) && (wr->num_sge != 1 || wr->sg_list[0].length != sizeof(u64)))
		return -EINVAL;
	if (!(wr->send_flags & IB_SEND_INLINE))
		return put_data_segs(wqe, wr);
	if (is_atomic(wr) || wr->opcode == IB_WR_RDMA_READ)
		return -EINVAL;
	return put_inline_seg(wqe, wr);
}

static u8 ctrl_flags(const struct kite_mlx5_wr *wr)
{
	return (wr->send_flags & IB_SEND_SIGNALED ? MLX5_WQE_CTRL_CQ_UPDATE : 0) |
	       (wr->send_flags & IB_SEND_SOLICITED ? MLX5_WQE_CTRL_SOLICITED : 0) |
	       (wr->send_flags & IB_SEND_FENCE ? MLX5_FENCE_MODE_FENCE : 0);
}

/* Builds the WQE but for the fields that depend on its position in the ring. */
static int build_wqe(struct kite_mlx5_qp *qp, struct wqe *wqe, const struct kite_mlx5_wr *wr)
{
	bool dc = qp->init.type == KITE_MLX5_DCI;
	struct mlx5_wqe_ctrl_seg *ctrl;
	int err;

	if (wqe_opcode(wr) < 0 || dc != !!wr->av)
		return -EINVAL;
	/* The hardware reads reserved fields, which are not written below. */
	memset(wqe, 0, sizeof(*wqe));
	ctrl = append_seg(wqe, sizeof(*ctrl));
	if (dc)
		put_datagram_seg(wqe, wr);
	if (!is_send(wr))
		put_raddr_seg(wqe, wr);
	if (is_atomic(wr))
		put_atomic_seg(wqe, wr);
	err = put_data(wqe, wr);
	*ctrl = (struct mlx5_wqe_ctrl_seg) {
		.qpn_ds = cpu_to_be32(qp->qpn << 8 | wqe->len / 16),
		.fm_ce_se = ctrl_flags(wr),
		.imm = has_imm(wr) ? wr->imm : 0,
	};
	return err;
}

/* Copies the WQE into the ring. Returns the value for the doorbell register. */
static u64 write_wqe(struct kite_mlx5_qp *qp, struct wqe *wqe, const struct kite_mlx5_wr *wr)
{
	struct mlx5_wqe_ctrl_seg *ctrl = (struct mlx5_wqe_ctrl_seg *)wqe->bytes;
	struct kite_mlx5_sq_entry *posted = &qp->posted[qp->head & (qp->ring.count - 1)];
	u32 wqebbs = DIV_ROUND_UP(wqe->len, MLX5_SEND_WQE_BB);
	u32 i;

	ctrl->opmod_idx_opcode = cpu_to_be32((qp->head & 0xffff) << 8 | wqe_opcode(wr));
	posted->wr_id = wr->wr_id;
	posted->wqebbs = wqebbs;
	for (i = 0; i < wqebbs; i++)
		memcpy(kite_mlx5_ring_entry(&qp->ring, qp->head + i),
		       wqe->bytes + i * MLX5_SEND_WQE_BB, MLX5_SEND_WQE_BB);
	qp->head += wqebbs;
	return *(u64 *)wqe->bytes;
}

static void ring_doorbell(struct kite_mlx5_qp *qp, u64 doorbell)
{
	/* The WQEs are complete before the hardware sees the counter. */
	dma_wmb();
	qp->ring.db.db[MLX5_SND_DBR] = cpu_to_be32(qp->head & 0xffff);
	/* The doorbell record is written before the doorbell register. */
	wmb();
	mlx5_write64((__be32 *)&doorbell, qp->dev->bfreg.map);
}

static bool has_sq_space(struct kite_mlx5_qp *qp, const struct wqe *wqe)
{
	u32 wqebbs = DIV_ROUND_UP(wqe->len, MLX5_SEND_WQE_BB);
	/*
	 * Pairs with the release in kite_mlx5_complete_send(): the CQEs of the freed WQEs were
	 * read.
	 */
	u32 tail = smp_load_acquire(&qp->tail);

	return qp->head - tail + wqebbs <= qp->ring.count;
}

int kite_mlx5_post_send(struct kite_mlx5_qp *qp, const struct kite_mlx5_wr *wr, int count,
			int *posted)
{
	unsigned long flags;
	struct wqe wqe;
	u64 doorbell = 0;
	int err = 0;
	int i;

	*posted = 0;
	if (kite_mlx5_has_failed(qp->dev))
		return -ENODEV;
	spin_lock_irqsave(&qp->lock, flags);
	for (i = 0; i < count; i++) {
		err = build_wqe(qp, &wqe, &wr[i]);
		if (!err && !has_sq_space(qp, &wqe))
			err = -ENOBUFS;
		if (err)
			break;
		doorbell = write_wqe(qp, &wqe, &wr[i]);
	}
	if (i)
		ring_doorbell(qp, doorbell);
	spin_unlock_irqrestore(&qp->lock, flags);
	*posted = i;
	return err;
}

bool kite_mlx5_complete_send(struct kite_mlx5_qp *qp, u16 block, u64 *wr_id)
{
	/* The hardware counter has 16 bits; a ring has fewer blocks. */
	u32 wqebbs_ahead = (u16)(block - qp->tail);
	u32 at = qp->tail + wqebbs_ahead;
	const struct kite_mlx5_sq_entry *posted = &qp->posted[at & (qp->ring.count - 1)];

	if (wqebbs_ahead >= READ_ONCE(qp->head) - qp->tail)
		return false;
	*wr_id = posted->wr_id;
	/* Pairs with the acquire in has_sq_space(): the blocks may be overwritten. */
	smp_store_release(&qp->tail, at + posted->wqebbs);
	return true;
}

bool kite_mlx5_flush_send(struct kite_mlx5_qp *qp, u64 *wr_id)
{
	const struct kite_mlx5_sq_entry *posted = &qp->posted[qp->tail & (qp->ring.count - 1)];

	if (READ_ONCE(qp->head) == qp->tail)
		return false;
	*wr_id = posted->wr_id;
	/* Pairs with the acquire in has_sq_space(). */
	smp_store_release(&qp->tail, qp->tail + posted->wqebbs);
	return true;
}
