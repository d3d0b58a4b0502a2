// SPDX-License-Identifier: GPL-2.0
/*
 * Lends memory as the kernel's storage drivers do, by fast registration: a work request gives a key
 * to the pages of a scatterlist, and another one, of either side, takes it away. Uses verbs alone:
 * it shows whether an RNIC and its driver are fit for that. Two queue pairs of one port are
 * connected to each other, of which near uses the memory that far lends.
 *
 *	insmod kite_fastreg.ko device=mlx5_0
 *
 * Loading does it all and logs a line for each case. It fails with the error of the first case that
 * is not as it should be; there is nothing to do after that, so unload it at will.
 */
#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include <linux/completion.h>
#include <linux/delay.h>
#include <linux/mm.h>
#include <linux/module.h>
#include <linux/scatterlist.h>

#include <rdma/ib_cache.h>
#include <rdma/ib_verbs.h>

#include "qp.h"

static char *device_name = "";
module_param_named(device, device_name, charp, 0444);
MODULE_PARM_DESC(device, "name of the RNIC, as in /sys/class/infiniband");

#define MAX_ENTRIES 16
#define TIMEOUT_JIFFIES (30 * HZ)

#define READ_WRITE (IB_ACCESS_LOCAL_WRITE | IB_ACCESS_REMOTE_READ | IB_ACCESS_REMOTE_WRITE)
#define READ_ONLY IB_ACCESS_REMOTE_READ

/* A work request under way, and how it ended. */
struct request {
	struct ib_cqe cqe;
	struct completion done;
	struct ib_wc wc;
};

/* One side of the connection; at most one request of each kind is under way. */
struct endpoint {
	struct ib_qp *qp;
	struct request send;
	struct request receive;
};

/* What a memory region is made of. */
struct mr_layout {
	const char *name;
	enum ib_mr_type type;
	int entries;
};

static struct ib_device *device;
static struct ib_pd *pd;
static struct ib_cq *cq;
static struct endpoint near, far;

/* Memory that far registers: pages, and the MR that each case registers again. */
static struct scatterlist lent_sgl[MAX_ENTRIES];
static struct ib_mr *mr;
static u8 expected_seed;

/* What near sends from and receives into. */
static u8 *local;
#define LOCAL_BYTES (MAX_ENTRIES * PAGE_SIZE)

/* Requests. */

static void on_request_done(struct ib_cq *from, struct ib_wc *wc)
{
	struct request *request = container_of(wc->wr_cqe, struct request, cqe);

	request->wc = *wc;
	complete(&request->done);
}

static void init_request(struct request *request)
{
	request->cqe.done = on_request_done;
	init_completion(&request->done);
}

static int wait_request(struct request *request, enum ib_wc_status expected)
{
	if (!wait_for_completion_timeout(&request->done, TIMEOUT_JIFFIES))
		return -ETIMEDOUT;
	if (request->wc.status == expected)
		return 0;
	pr_err("a request ended with \"%s\" instead of \"%s\"\n",
	       ib_wc_status_msg(request->wc.status), ib_wc_status_msg(expected));
	return -EIO;
}

static int send(struct endpoint *end, struct ib_send_wr *wr, enum ib_wc_status expected)
{
	int err;

	init_request(&end->send);
	wr->wr_cqe = &end->send.cqe;
	wr->send_flags |= IB_SEND_SIGNALED;
	err = ib_post_send(end->qp, wr, NULL);
	return err ?: wait_request(&end->send, expected);
}

static int post_reg_mr(int access)
{
	struct ib_reg_wr wr = {
		.wr.opcode = IB_WR_REG_MR,
		.mr = mr,
		.key = mr->rkey,
		.access = access,
	};

	return send(&far, &wr.wr, IB_WC_SUCCESS);
}

static int invalidate(void)
{
	struct ib_send_wr wr = { .opcode = IB_WR_LOCAL_INV, .ex.invalidate_rkey = mr->rkey };

	return send(&far, &wr, IB_WC_SUCCESS);
}

/* Near invalidates the key by a SEND with invalidate to far. */
static int post_send_with_inv(void)
{
	struct ib_send_wr wr = { .opcode = IB_WR_SEND_WITH_INV, .ex.invalidate_rkey = mr->rkey };
	struct ib_recv_wr receive = { .wr_cqe = &far.receive.cqe };
	const struct ib_wc *wc = &far.receive.wc;
	int err;

	init_request(&far.receive);
	err = ib_post_recv(far.qp, &receive, NULL);
	if (!err)
		err = send(&near, &wr, IB_WC_SUCCESS);
	if (!err)
		err = wait_request(&far.receive, IB_WC_SUCCESS);
	if (err)
		return err;
	if (!(wc->wc_flags & IB_WC_WITH_INVALIDATE) || wc->ex.invalidate_rkey != mr->rkey)
		return -EBADMSG;
	return 0;
}

/* Moves all that is lent_sgl, from or to local memory. */
static int transfer(enum ib_wr_opcode opcode, u32 key, enum ib_wc_status expected)
{
	bool write = opcode == IB_WR_RDMA_WRITE;
	enum dma_data_direction direction = write ? DMA_TO_DEVICE : DMA_FROM_DEVICE;
	struct ib_sge sge = { .length = mr->length, .lkey = pd->local_dma_lkey };
	struct ib_rdma_wr wr = {
		.wr.opcode = opcode,
		.wr.sg_list = &sge,
		.wr.num_sge = 1,
		.remote_addr = mr->iova,
		.rkey = key,
	};
	int err;

	sge.addr = ib_dma_map_single(device, local, LOCAL_BYTES, direction);
	if (ib_dma_mapping_error(device, sge.addr))
		return -ENOMEM;
	err = send(&near, &wr.wr, expected);
	ib_dma_unmap_single(device, sge.addr, LOCAL_BYTES, direction);
	return err;
}

/* The connection. */

static int get_path(struct rdma_ah_attr *path, struct ib_port_attr *port)
{
	int err = ib_query_port(device, PORT, port);
	const struct ib_gid_attr *attr;
	union ib_gid gid;

	if (err)
		return err;
	path->type = rdma_ah_find_type(device, PORT);
	rdma_ah_set_port_num(path, PORT);
	if (path->type == RDMA_AH_ATTR_TYPE_IB) {
		rdma_ah_set_dlid(path, port->lid);
		return 0;
	}
	attr = rdma_get_gid_attr(device, PORT, 0);
	if (IS_ERR(attr))
		return PTR_ERR(attr);
	gid = attr->gid;
	rdma_ah_set_grh(path, &gid, 0, 0, 64, 0);
	err = rdma_read_gid_l2_fields(attr, NULL, path->roce.dmac);
	rdma_put_gid_attr(attr);
	return err;
}

static int modify_to_reset(struct ib_qp *qp)
{
	struct ib_qp_attr attr = { .qp_state = IB_QPS_RESET };

	return ib_modify_qp(qp, &attr, IB_QP_STATE);
}

static int modify_to_rtr(struct ib_qp *qp, struct ib_qp *peer)
{
	struct ib_qp_attr attr = {
		.qp_state = IB_QPS_RTR,
		.dest_qp_num = peer->qp_num,
		.max_dest_rd_atomic = 1,
		.min_rnr_timer = 12,
	};
	struct ib_port_attr port = {};
	int err = get_path(&attr.ah_attr, &port);

	attr.path_mtu = port.active_mtu;
	return err ?: ib_modify_qp(qp, &attr, IB_QP_STATE | IB_QP_AV | IB_QP_PATH_MTU |
				   IB_QP_DEST_QPN | IB_QP_RQ_PSN | IB_QP_MAX_DEST_RD_ATOMIC |
				   IB_QP_MIN_RNR_TIMER);
}

/* Also after an error, which ends both sides. */
static int connect(void)
{
	int err = modify_to_reset(near.qp) ?: modify_to_reset(far.qp);

	if (!err)
		err = modify_to_init(near.qp) ?: modify_to_init(far.qp);
	if (!err)
		err = modify_to_rtr(near.qp, far.qp) ?: modify_to_rtr(far.qp, near.qp);
	return err ?: modify_to_rts(near.qp) ?: modify_to_rts(far.qp);
}

/* Memory. */

static u8 pattern(u8 seed, size_t i)
{
	return seed * (i % 251 + 1);
}

static int check_pattern(u8 seed)
{
	size_t i;

	for (i = 0; i < mr->length; i++)
		if (local[i] != pattern(seed, i))
			return -EBADMSG;
	return 0;
}

static int write(u8 seed)
{
	size_t i;

	for (i = 0; i < mr->length; i++)
		local[i] = pattern(seed, i);
	expected_seed = seed;
	return transfer(IB_WR_RDMA_WRITE, mr->rkey, IB_WC_SUCCESS);
}

static int read(void)
{
	memset(local, ~expected_seed, mr->length);
	return transfer(IB_WR_RDMA_READ, mr->rkey, IB_WC_SUCCESS) ?: check_pattern(expected_seed);
}

/* Each side reports the error before its QP changes its state: an earlier reset would be undone. */
static int wait_qp_error(struct ib_qp *qp)
{
	unsigned long end = jiffies + TIMEOUT_JIFFIES;
	struct ib_qp_init_attr init;
	struct ib_qp_attr attr;
	int err;

	do {
		err = ib_query_qp(qp, &attr, IB_QP_STATE, &init);
		if (err || attr.qp_state == IB_QPS_ERR)
			return err;
		msleep(20);
	} while (time_before(jiffies, end));
	return -ETIMEDOUT;
}

/* The key does not allow the access: no byte moves, and the connection must be set up again. */
static int expect_refused(enum ib_wr_opcode opcode, u32 key)
{
	memset(local, ~expected_seed, mr->length);
	return transfer(opcode, key, IB_WC_REM_ACCESS_ERR) ?: wait_qp_error(near.qp) ?:
	       wait_qp_error(far.qp) ?: connect();
}

/*
 * A list of pages may init_request and end within one; what has gaps need not be of pages at all.
 */
static void init_sgl(const struct mr_layout *mr_layout)
{
	int i, last = mr_layout->entries - 1;

	for (i = 0; i <= last; i++) {
		uint offset = i ? 0 : 512;
		uint end = i < last ? PAGE_SIZE : 1000;

		if (mr_layout->type == IB_MR_TYPE_SG_GAPS) {
			offset = 64 * i;
			end = 3000 + i;
		}
		clear_page(page_address(sg_page(&lent_sgl[i])));
		sg_set_page(&lent_sgl[i], sg_page(&lent_sgl[i]), end - offset, offset);
		sg_unmark_end(&lent_sgl[i]);
	}
	sg_mark_end(&lent_sgl[last]);
	expected_seed = 0;
}

static int map_mr(const struct mr_layout *mr_layout)
{
	int count, mapped;

	count = ib_dma_map_sg(device, lent_sgl, mr_layout->entries, DMA_BIDIRECTIONAL);
	if (!count)
		return -ENOMEM;
	mapped = ib_map_mr_sg(mr, lent_sgl, count, NULL, PAGE_SIZE);
	if (mapped == count)
		return 0;
	ib_dma_unmap_sg(device, lent_sgl, mr_layout->entries, DMA_BIDIRECTIONAL);
	return mapped < 0 ? mapped : -EINVAL;
}

/* What was written is there, and nothing around it. */
static int check_memory(const struct mr_layout *mr_layout)
{
	size_t copied = sg_copy_to_buffer(lent_sgl, mr_layout->entries, local, LOCAL_BYTES);
	int i;

	if (copied != mr->length || check_pattern(expected_seed))
		return -EBADMSG;
	sg_zero_buffer(lent_sgl, mr_layout->entries, copied, 0);
	for (i = 0; i < mr_layout->entries; i++)
		if (memchr_inv(page_address(sg_page(&lent_sgl[i])), 0, PAGE_SIZE))
			return -EBADMSG;
	return 0;
}

/* Cases. */

static int access_by_key(void)
{
	return expect_refused(IB_WR_RDMA_WRITE, mr->rkey) ?: post_reg_mr(READ_WRITE) ?: write(1) ?:
	       read() ?: write(2);
}

static int no_right_to_write(void)
{
	return post_reg_mr(READ_WRITE) ?: write(3) ?: invalidate() ?:
	       post_reg_mr(READ_ONLY) ?: read() ?: expect_refused(IB_WR_RDMA_WRITE, mr->rkey) ?:
	       read();
}

static int local_invalidate(void)
{
	return post_reg_mr(READ_WRITE) ?: write(4) ?: invalidate() ?:
	       expect_refused(IB_WR_RDMA_WRITE, mr->rkey) ?:
	       expect_refused(IB_WR_RDMA_READ, mr->rkey);
}

static int send_with_invalidate(void)
{
	return post_reg_mr(READ_WRITE) ?: write(5) ?: post_send_with_inv() ?:
	       expect_refused(IB_WR_RDMA_WRITE, mr->rkey) ?:
	       expect_refused(IB_WR_RDMA_READ, mr->rkey);
}

static int another_key(void)
{
	u32 old_rkey = mr->rkey;
	int err;

	err = post_reg_mr(READ_WRITE) ?: write(6) ?: invalidate();
	if (err)
		return err;
	ib_update_fast_reg_key(mr, ib_inc_rkey(old_rkey));
	return post_reg_mr(READ_WRITE) ?: read() ?: write(7) ?:
	       expect_refused(IB_WR_RDMA_WRITE, old_rkey) ?: read();
}

static const struct {
	const char *name;
	int (*run)(void);
} cases[] = {
	{ "access by key", access_by_key },
	{ "no right to write", no_right_to_write },
	{ "local invalidate", local_invalidate },
	{ "send with invalidate", send_with_invalidate },
	{ "another key", another_key },
};

/* Few entries are within the work request itself. */
static const struct mr_layout mr_layouts[] = {
	{ "few pages", IB_MR_TYPE_MEM_REG, 3 },
	{ "many pages", IB_MR_TYPE_MEM_REG, MAX_ENTRIES },
	{ "few pieces", IB_MR_TYPE_SG_GAPS, 3 },
	{ "many pieces", IB_MR_TYPE_SG_GAPS, MAX_ENTRIES },
};

static int run_with_memory(const struct mr_layout *mr_layout, int (*run)(void))
{
	int err;

	init_sgl(mr_layout);
	err = map_mr(mr_layout);
	if (err)
		return err;
	err = connect() ?: run();
	ib_dma_unmap_sg(device, lent_sgl, mr_layout->entries, DMA_BIDIRECTIONAL);
	return err ?: check_memory(mr_layout);
}

static int run_case(const struct mr_layout *mr_layout, int (*run)(void))
{
	int err;

	mr = ib_alloc_mr(pd, mr_layout->type, mr_layout->entries);
	if (IS_ERR(mr))
		return PTR_ERR(mr);
	err = run_with_memory(mr_layout, run);
	return ib_dereg_mr(mr) ?: err;
}

static int run_cases(const struct mr_layout *mr_layout)
{
	size_t i;
	int err;

	for (i = 0; i < ARRAY_SIZE(cases); i++) {
		err = run_case(mr_layout, cases[i].run);
		if (err) {
			pr_err("%s, %s: error %d\n", mr_layout->name, cases[i].name, err);
			return err;
		}
		pr_info("%s, %s: ok\n", mr_layout->name, cases[i].name);
	}
	return 0;
}

static bool is_supported(const struct mr_layout *mr_layout)
{
	return mr_layout->type == IB_MR_TYPE_MEM_REG ||
	       device->attrs.kernel_cap_flags & IBK_SG_GAPS_REG;
}

static int run_all(void)
{
	size_t i;
	int err = 0;

	for (i = 0; i < ARRAY_SIZE(mr_layouts) && !err; i++)
		if (is_supported(&mr_layouts[i]))
			err = run_cases(&mr_layouts[i]);
	return err;
}

/* What all cases share. */

static int create_qp(struct endpoint *end)
{
	struct ib_qp_init_attr attr = {
		.qp_type = IB_QPT_RC,
		.send_cq = cq,
		.recv_cq = cq,
		.cap = { .max_send_wr = 4, .max_recv_wr = 1, .max_send_sge = 1, .max_recv_sge = 1 },
	};

	end->qp = ib_create_qp(pd, &attr);
	return PTR_ERR_OR_ZERO(end->qp);
}

static int create_objects(void)
{
	pd = ib_alloc_pd(device, 0);
	if (IS_ERR(pd))
		return PTR_ERR(pd);
	cq = ib_alloc_cq_any(device, NULL, 16, IB_POLL_SOFTIRQ);
	if (IS_ERR(cq))
		return PTR_ERR(cq);
	return create_qp(&near) ?: create_qp(&far);
}

/* Requests in flight end with the QPs, without completions. */
static void destroy_objects(void)
{
	if (!IS_ERR_OR_NULL(near.qp))
		ib_destroy_qp(near.qp);
	if (!IS_ERR_OR_NULL(far.qp))
		ib_destroy_qp(far.qp);
	if (!IS_ERR_OR_NULL(cq))
		ib_free_cq(cq);
	if (!IS_ERR_OR_NULL(pd))
		ib_dealloc_pd(pd);
}

static void free_memory(void)
{
	int i;

	for (i = 0; i < MAX_ENTRIES; i++)
		if (sg_page(&lent_sgl[i]))
			__free_page(sg_page(&lent_sgl[i]));
	kfree(local);
}

static int alloc_memory(void)
{
	int i;

	sg_init_table(lent_sgl, MAX_ENTRIES);
	local = kmalloc(LOCAL_BYTES, GFP_KERNEL);
	if (!local)
		return -ENOMEM;
	for (i = 0; i < MAX_ENTRIES; i++) {
		struct page *page = alloc_page(GFP_KERNEL);

		if (!page)
			return -ENOMEM;
		sg_set_page(&lent_sgl[i], page, PAGE_SIZE, 0);
	}
	return 0;
}

static int check_device(void)
{
	int err;

	if (!(device->attrs.device_cap_flags & IB_DEVICE_MEM_MGT_EXTENSIONS))
		return -EOPNOTSUPP;
	err = alloc_memory() ?: create_objects() ?: run_all();
	destroy_objects();
	free_memory();
	return err;
}

/* Devices are found as any client of ib_core finds them. */
static int add_device(struct ib_device *ibdev)
{
	if (device || strcmp(dev_name(&ibdev->dev), device_name) ||
	    !ib_device_try_get(ibdev))
		return -EOPNOTSUPP;
	device = ibdev;
	return 0;
}

static struct ib_client client = {
	.name = KBUILD_MODNAME,
	.add = add_device,
};

static int __init kite_fastreg_init(void)
{
	int err = ib_register_client(&client);

	if (err)
		return err;
	ib_unregister_client(&client);
	if (!device)
		return -ENODEV;
	err = check_device();
	ib_device_put(device);
	return err;
}
module_init(kite_fastreg_init);

static void __exit kite_fastreg_exit(void)
{
}
module_exit(kite_fastreg_exit);

MODULE_DESCRIPTION("Lends memory by fast registration, with verbs alone");
MODULE_AUTHOR("The kite developers");
MODULE_LICENSE("GPL");
