// SPDX-License-Identifier: GPL-2.0
/*
 * A thread that reads a region until a read fails.
 *
 *	insmod kite_watch.ko region=NAME
 *	cat /sys/module/kite_watch/parameters/{reads,ended}
 *
 * The parameter ended is 0 while reads succeed, and then the error. The module can be unloaded at
 * any time.
 */
#include <linux/kthread.h>
#include <linux/module.h>
#include <linux/slab.h>

#include <kite.h>

static char *region = "";
module_param(region, charp, 0444);
MODULE_PARM_DESC(region, "name of a region of at least 64 bytes");

static ulong reads;
module_param(reads, ulong, 0444);
MODULE_PARM_DESC(reads, "number of successful reads");

static int ended;
module_param(ended, int, 0444);
MODULE_PARM_DESC(ended, "error of the read that failed, or 0");

static struct kite_session *session;
static struct task_struct *reader;
static u64 handle;
static u8 *buf;
#define READ_BYTES 64

static int read_loop(void *unused)
{
	while (!kthread_should_stop() && !ended) {
		ended = kite_read(session, handle, 0, buf, READ_BYTES);
		reads += !ended;
		cond_resched();
	}
	/* kthread_stop() needs a thread that still exists. */
	while (!kthread_should_stop())
		schedule_timeout_interruptible(HZ);
	return 0;
}

static int start(void)
{
	int err = kite_map(session, region, KITE_READ, &handle, NULL);

	if (err)
		return err;
	reader = kthread_run(read_loop, NULL, "kite_watch");
	return PTR_ERR_OR_ZERO(reader);
}

static int __init kite_watch_init(void)
{
	int err;

	buf = kmalloc(READ_BYTES, GFP_KERNEL);
	if (!buf)
		return -ENOMEM;
	session = kite_open(NULL);
	err = PTR_ERR_OR_ZERO(session);
	if (err)
		goto free;
	err = start();
	if (!err)
		return 0;
	kite_close(session);
free:
	kfree(buf);
	return err;
}
module_init(kite_watch_init);

static void __exit kite_watch_exit(void)
{
	kthread_stop(reader);
	kite_close(session);
	kfree(buf);
}
module_exit(kite_watch_exit);

MODULE_DESCRIPTION("Reads a region from the kernel until that fails");
MODULE_AUTHOR("The kite developers");
MODULE_LICENSE("GPL");
