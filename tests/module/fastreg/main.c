// SPDX-License-Identifier: GPL-2.0
/*
 * Lends memory by fast registration, as the kernel's storage drivers do. A work request gives a key
 * to the pages of a scatterlist; another one, of either side, invalidates the key. Two queue pairs
 * of one port are connected to each other: near accesses the memory of far. The module uses verbs
 * alone: it shows whether an RNIC and its driver support fast registration.
 *
 *	insmod kite_fastreg.ko device=mlx5_0
 *
 * Loading runs all cases and logs a line for each. It fails with the error of the first case that
 * fails. A loaded module does nothing more, and can be unloaded at any time.
 */
#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include <linux/mm.h>
#include <linux/module.h>
#include <linux/slab.h>

#include "fastreg.h"

static char *device_name = "";
module_param_named(device, device_name, charp, 0444);
MODULE_PARM_DESC(device, "name of the RNIC, as in /sys/class/infiniband");

#define READ_WRITE (IB_ACCESS_LOCAL_WRITE | IB_ACCESS_REMOTE_READ | IB_ACCESS_REMOTE_WRITE)
#define READ_ONLY IB_ACCESS_REMOTE_READ

/* Type and number of entries of a memory region. */
struct mr_layout {
	const char *name;
	enum ib_mr_type type;
	int entries;
};

struct ib_device *device;
struct ib_pd *pd;
static struct ib_cq *cq;
struct endpoint near, far;

struct scatterlist lent_sgl[MAX_ENTRIES];
struct ib_mr *mr;
static u8 expected_seed;

u8 *local;

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

/* The key does not allow the access: no data is transferred, and the error ends the connection. */
static int expect_refused(enum ib_wr_opcode opcode, u32 key)
{
	memset(local, ~expected_seed, mr->length);
	return transfer(opcode, key, IB_WC_REM_ACCESS_ERR) ?: wait_qp_error(near.qp) ?:
	       wait_qp_error(far.qp) ?: connect();
}

/*
 * Makes the scatterlist. A list of pages may begin and end within a page. With IB_MR_TYPE_SG_GAPS
 * each entry may.
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

/* The memory has the written pattern, and no byte around it changed. */
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

static const struct test cases[] = {
	{ "access by key", access_by_key },
	{ "no right to write", no_right_to_write },
	{ "local invalidate", local_invalidate },
	{ "send with invalidate", send_with_invalidate },
	{ "another key", another_key },
};

/* Drivers put a short list of entries into the work request itself. */
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
	int err = 0;
	size_t i;

	for (i = 0; i < ARRAY_SIZE(cases) && !err; i++)
		err = report_case(mr_layout->name, cases[i].name,
				  run_case(mr_layout, cases[i].run));
	return err;
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

/* Objects and memory of all cases. */

static int create_qp(struct endpoint *end)
{
	end->qp = create_rc_qp(pd, cq, 4);
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

/* The queue pairs go first: their requests in flight end without a completion. */
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

/* The device is taken from the list that ib_core gives each client. */
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

MODULE_DESCRIPTION("Tests fast registration of memory, with verbs alone");
MODULE_AUTHOR("The kite developers");
MODULE_LICENSE("GPL");
