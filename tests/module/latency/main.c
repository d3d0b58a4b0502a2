// SPDX-License-Identifier: GPL-2.0
/*
 * Measures the time of single reads or writes from within the kernel, by kite or by verbs alone:
 * the cost of kite for its kernel users, beside the minimum. Both RNICs are in this machine, so
 * verbs need no agreement with another kernel. Loading measures, and leaves the result in a
 * parameter:
 *
 *	insmod kite_latency.ko contender=kite operation=write size=64 count=100
 *	cat /sys/module/kite_latency/parameters/median_ns
 */
#include <linux/ktime.h>
#include <linux/module.h>
#include <linux/netdevice.h>
#include <linux/slab.h>

#include <kite.h>
#include <rdma/ib_verbs.h>

#include "../common.h"
#include "latency.h"

static char *contender = "kite";
module_param(contender, charp, 0444);
MODULE_PARM_DESC(contender, "kite or verbs (default kite)");

static char *operation = "write";
module_param(operation, charp, 0444);
MODULE_PARM_DESC(operation, "write or read (default write)");

static uint size = 64;
module_param(size, uint, 0444);
MODULE_PARM_DESC(size, "bytes of an operation (default 64)");

static uint count = 100;
module_param(count, uint, 0444);
MODULE_PARM_DESC(count, "operations to measure (default 100)");

static uint node = 2;
module_param(node, uint, 0444);
MODULE_PARM_DESC(node, "node number of the other RNIC (default 2)");

static char *from = "left";
module_param(from, charp, 0444);
MODULE_PARM_DESC(from, "network device of this RNIC (default left)");

static char *to = "right";
module_param(to, charp, 0444);
MODULE_PARM_DESC(to, "network device of the other RNIC (default right)");

static ulong median_ns;
module_param(median_ns, ulong, 0444);
MODULE_PARM_DESC(median_ns, "result: median time of an operation, in ns");

static struct kite_session *session;
static u64 handle;
static void *memory;

static struct kite_session *open_session_on(const char *netdev)
{
	struct net_device *net = dev_get_by_name(&init_net, netdev);
	struct ib_device *device = net ? ib_device_get_by_netdev(net, RDMA_DRIVER_UNKNOWN) : NULL;
	struct kite_session *opened = ERR_PTR(-ENODEV);

	if (device) {
		opened = kite_open(dev_name(&device->dev));
		ib_device_put(device);
	}
	dev_put(net);
	return opened;
}

static int open_kite(const char *near, const char *far, void *buf, size_t len)
{
	memory = buf;
	session = open_session_on(near);
	if (IS_ERR(session))
		return PTR_ERR(session);
	return kite_alloc(session, NULL, len, &node, 1, 0, &handle);
}

static int transfer_kite(bool write)
{
	if (write)
		return kite_write(session, handle, 0, memory, size);
	return kite_read(session, handle, 0, memory, size);
}

static void close_kite(void)
{
	if (!IS_ERR(session))
		kite_close(session);
}

static const struct transport_ops kite_ops = {
	.name = "kite",
	.open = open_kite,
	.transfer = transfer_kite,
	.close = close_kite,
};

/* Transfers a pattern there and back: times of transfers that corrupt data are no result. */
static int verify(const struct transport_ops *ops, u8 *buf)
{
	size_t i;
	int err;

	for (i = 0; i < size; i++)
		buf[i] = i * 7 + 1;
	err = ops->transfer(true);
	if (err)
		return err;
	memset(buf, 0, size);
	err = ops->transfer(false);
	for (i = 0; !err && i < size; i++)
		err = buf[i] == (u8)(i * 7 + 1) ? 0 : -EBADMSG;
	return err;
}

static int repeat(const struct transport_ops *ops, bool write, u64 *times)
{
	uint warmup = count / 10 + 1;
	uint i;
	int err;

	for (i = 0; i < warmup + count; i++) {
		u64 start = ktime_get_ns();

		err = ops->transfer(write);
		if (err)
			return err;
		if (i >= warmup)
			times[i - warmup] = ktime_get_ns() - start;
	}
	median_ns = median_of(times, count);
	return 0;
}

static int measure(const struct transport_ops *ops, void *buf, u64 *times)
{
	int err = ops->open(from, to, buf, size);

	if (!err)
		err = verify(ops, buf);
	if (!err)
		err = repeat(ops, !strcmp(operation, "write"), times);
	ops->close();
	return err;
}

static int __init kite_latency_init(void)
{
	const struct transport_ops *ops = &kite_ops;
	u64 *times;
	void *buf;
	int err = -ENOMEM;

	if (!strcmp(contender, verbs_ops.name))
		ops = &verbs_ops;
	if (!size || !count)
		return -EINVAL;
	times = kvmalloc_array(count, sizeof(*times), GFP_KERNEL);
	buf = kzalloc(size, GFP_KERNEL);
	if (times && buf)
		err = measure(ops, buf, times);
	kfree(buf);
	kvfree(times);
	return err;
}
module_init(kite_latency_init);

static void __exit kite_latency_exit(void)
{
}
module_exit(kite_latency_exit);

MODULE_DESCRIPTION("Measures reads and writes by kite and by verbs alone");
MODULE_AUTHOR("The kite developers");
MODULE_LICENSE("GPL");
