// SPDX-License-Identifier: GPL-2.0
/*
 * Tests the bridge to mlx5_core as the fabric uses it: DC and RC queue pairs that the kernel
 * creates by firmware commands, beside those of mlx5_ib. Near sends to far, which may be the same
 * RNIC.
 *
 *	insmod kite_dc.ko near=mlx5_0 far=mlx5_1
 *
 * Loading runs all cases and logs a line for each. It fails with the error of the first case that
 * fails. A loaded module does nothing more, and can be unloaded at any time.
 */
#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include <linux/dma-mapping.h>
#include <linux/module.h>

#include "dc.h"

static char *near_name = "";
module_param_named(near, near_name, charp, 0444);
MODULE_PARM_DESC(near, "name of the sending RNIC, as in /sys/class/infiniband");
static char *far_name = "";
module_param_named(far, far_name, charp, 0444);
MODULE_PARM_DESC(far, "name of the receiving RNIC");

struct endpoint near, far;
struct kite_mlx5_av av_to_far, av_to_near;
struct kite_mlx5_qp *qp;

/* Connections. */

static struct kite_mlx5_qp_attr common_attr(void)
{
	return (struct kite_mlx5_qp_attr) {
		.mtu = IB_MTU_4096,
		.port = PORT,
		.timeout = 14,
		.retry_cnt = 7,
		.rnr_retry = 1,
		.max_rd_atomic = 4,
	};
}

static int start_dci(void)
{
	struct kite_mlx5_qp_attr attr = common_attr();

	return kite_mlx5_qp_to_rts(near.dci, &attr);
}

static int start_rc(struct endpoint *end, struct endpoint *peer, const struct kite_mlx5_av *av)
{
	struct kite_mlx5_qp_attr attr = common_attr();

	attr.max_dest_rd_atomic = 4;
	attr.min_rnr_timer = 1;
	attr.access = ACCESS;
	attr.dest_qp_num = kite_mlx5_qp_number(peer->rc);
	attr.sq_psn = end == &near ? 100 : 0xfffff0;
	attr.rq_psn = end == &near ? 0xfffff0 : 100;
	attr.av = av;
	return kite_mlx5_qp_to_rts(end->rc, &attr);
}

/* Brings the queue pair from any state to RTS. */
int restart(void)
{
	int err = kite_mlx5_qp_to_reset(qp);

	if (err)
		return err;
	if (qp == near.dci)
		return start_dci();
	return kite_mlx5_qp_to_reset(far.rc) ?: start_rc(&near, &far, &av_to_far) ?:
	       start_rc(&far, &near, &av_to_near);
}

struct kite_mlx5_dct *create_dct(struct endpoint *end)
{
	struct kite_mlx5_dct_attr attr = {
		.cq = end->recv_cq,
		.rmp = end->rmp,
		.key = DC_KEY,
		.access = ACCESS,
		.mtu = IB_MTU_4096,
		.port = PORT,
		.hop_limit = 64,
		.min_rnr_timer = 1,
	};

	return kite_mlx5_dct_create(end->dev, &attr);
}

/* Cases. */

static int run_tests(const char *transport, const struct test *test)
{
	int err = 0;

	for (; test->name && !err; test++)
		err = report_case(transport, test->name, test->run());
	return err;
}

/* Runs the cases that any queue pair can run. */
static int run_common_tests(const char *transport)
{
	return run_tests(transport, transfer_tests) ?: run_tests(transport, error_tests);
}

static int run_all(void)
{
	int err = start_dci() ?: start_rc(&near, &far, &av_to_far) ?:
		  start_rc(&far, &near, &av_to_near);

	qp = near.dci;
	err = err ?: run_common_tests("DC") ?: run_tests("DC", dc_tests);
	qp = near.rc;
	return err ?: run_common_tests("RC");
}

/* Set-up. */

static void on_comp_event(void *context)
{
	struct endpoint *end = context;

	complete(&end->interrupt);
}

static int open_device(struct endpoint *end)
{
	struct kite_mlx5_caps caps;

	end->pd = ib_alloc_pd(end->ibdev, 0);
	if (IS_ERR(end->pd))
		return PTR_ERR(end->pd);
	end->dev = kite_mlx5_open(end->pd, NULL, NULL);
	if (IS_ERR(end->dev))
		return PTR_ERR(end->dev);
	kite_mlx5_query(end->dev, &caps);
	if (!caps.dc || !caps.atomics)
		return -EOPNOTSUPP;
	return kite_mlx5_global_mkey_create(end->dev, ACCESS, &end->key);
}

static int create_queues(struct endpoint *end)
{
	init_completion(&end->interrupt);
	end->send_cq = kite_mlx5_cq_create(end->dev, 4 * MAX_WQEBBS, 0, on_comp_event, end);
	if (IS_ERR(end->send_cq))
		return PTR_ERR(end->send_cq);
	end->recv_cq = kite_mlx5_cq_create(end->dev, 2 * NUM_RECVS, 0, NULL, NULL);
	if (IS_ERR(end->recv_cq))
		return PTR_ERR(end->recv_cq);
	end->rmp = kite_mlx5_rmp_create(end->dev, NUM_RECVS, 3);
	return PTR_ERR_OR_ZERO(end->rmp);
}

static int create_qps(struct endpoint *end)
{
	struct kite_mlx5_qp_init init = {
		.type = KITE_MLX5_DCI,
		.wqebbs = MAX_WQEBBS,
		.send_cq = end->send_cq,
	};
	int i;

	for (i = 0; i < NUM_DCTS; i++) {
		end->dct[i] = create_dct(end);
		if (IS_ERR(end->dct[i]))
			return PTR_ERR(end->dct[i]);
	}
	end->dci = kite_mlx5_qp_create(end->dev, &init);
	if (IS_ERR(end->dci))
		return PTR_ERR(end->dci);
	init.type = KITE_MLX5_RC;
	init.recv_cq = end->recv_cq;
	init.rmp = end->rmp;
	end->rc = kite_mlx5_qp_create(end->dev, &init);
	return PTR_ERR_OR_ZERO(end->rc);
}

static int resolve(struct endpoint *end, struct endpoint *peer, struct kite_mlx5_av *av)
{
	struct ib_port_attr port = {};
	struct rdma_ah_attr attr = { .type = rdma_ah_find_type(end->ibdev, PORT) };
	int err = ib_query_port(peer->ibdev, PORT, &port);

	rdma_ah_set_port_num(&attr, PORT);
	rdma_ah_set_dlid(&attr, port.lid);
	return err ?: kite_mlx5_av_resolve(end->dev, &attr, av);
}

static int create_objects(struct endpoint *end)
{
	end->memory = dma_alloc_coherent(end->ibdev->dma_device, MEMORY_BYTES, &end->addr,
					 GFP_KERNEL);
	if (!end->memory)
		return -ENOMEM;
	return open_device(end) ?: create_queues(end) ?: create_qps(end);
}

/* The test in tests/cluster fails on this message. */
static void report_destroy(const char *what, int err)
{
	if (err)
		pr_err("the %s cannot be destroyed: error %d\n", what, err);
}

static void destroy_qps(struct endpoint *end)
{
	int i;

	if (!IS_ERR_OR_NULL(end->rc))
		report_destroy("RC queue pair", kite_mlx5_qp_destroy(end->rc));
	if (!IS_ERR_OR_NULL(end->dci))
		report_destroy("DCI", kite_mlx5_qp_destroy(end->dci));
	for (i = 0; i < NUM_DCTS; i++)
		if (!IS_ERR_OR_NULL(end->dct[i]))
			report_destroy("DCT", kite_mlx5_dct_destroy(end->dct[i], TIMEOUT_JIFFIES));
}

static void destroy_queues(struct endpoint *end)
{
	if (!IS_ERR_OR_NULL(end->rmp))
		report_destroy("pool", kite_mlx5_rmp_destroy(end->rmp));
	if (!IS_ERR_OR_NULL(end->recv_cq))
		report_destroy("completion queue", kite_mlx5_cq_destroy(end->recv_cq));
	if (!IS_ERR_OR_NULL(end->send_cq))
		report_destroy("completion queue", kite_mlx5_cq_destroy(end->send_cq));
}

static void destroy_objects(struct endpoint *end)
{
	destroy_qps(end);
	destroy_queues(end);
	if (end->key)
		report_destroy("key", kite_mlx5_mkey_destroy(end->dev, end->key));
	if (!IS_ERR_OR_NULL(end->dev))
		kite_mlx5_close(end->dev);
	if (!IS_ERR_OR_NULL(end->pd))
		ib_dealloc_pd(end->pd);
	if (end->memory)
		dma_free_coherent(end->ibdev->dma_device, MEMORY_BYTES, end->memory, end->addr);
}

/* If near and far are one RNIC, two users share it. */
static int run_on_devices(void)
{
	int err = create_objects(&near) ?: create_objects(&far);

	err = err ?: resolve(&near, &far, &av_to_far) ?: resolve(&far, &near, &av_to_near);
	err = err ?: post_receives() ?: run_all();
	destroy_objects(&near);
	destroy_objects(&far);
	return err;
}

/* The device is taken from the list that ib_core gives each client. */
static void match_device(struct ib_device *candidate, const char *name, struct endpoint *end)
{
	if (!end->ibdev && !strcmp(dev_name(&candidate->dev), name) && ib_device_try_get(candidate))
		end->ibdev = candidate;
}

static int add_device(struct ib_device *candidate)
{
	match_device(candidate, near_name, &near);
	match_device(candidate, far_name, &far);
	return -EOPNOTSUPP;
}

static struct ib_client client = {
	.name = KBUILD_MODNAME,
	.add = add_device,
};

static int __init kite_dc_init(void)
{
	int err = ib_register_client(&client);

	if (err)
		return err;
	ib_unregister_client(&client);
	err = near.ibdev && far.ibdev ? run_on_devices() : -ENODEV;
	if (near.ibdev)
		ib_device_put(near.ibdev);
	if (far.ibdev)
		ib_device_put(far.ibdev);
	return err;
}
module_init(kite_dc_init);

static void __exit kite_dc_exit(void)
{
}
module_exit(kite_dc_exit);

MODULE_DESCRIPTION("Tests DC and RC queue pairs created by firmware commands");
MODULE_AUTHOR("The kite developers");
MODULE_LICENSE("GPL");
