// SPDX-License-Identifier: GPL-2.0
/*
 * Writes to a region with low priority until the module is unloaded, from a work item that queues
 * itself again.
 *
 *	insmod kite_background.ko region=NAME
 */
#include <linux/module.h>
#include <linux/sizes.h>
#include <linux/slab.h>
#include <linux/workqueue.h>

#include <kite.h>

static char *region;
module_param(region, charp, 0444);
MODULE_PARM_DESC(region, "name of a region of at least 64 KiB");

static struct kite_session *session;
static u64 handle;
static void *data;

static void write_work_fn(struct work_struct *work)
{
	int err = kite_write(session, handle, 0, data, SZ_64K);

	if (err)
		pr_err("write failed: %d\n", err);
	else
		schedule_work(work);
}

static DECLARE_WORK(write_work, write_work_fn);

static int start_writing(void)
{
	int err = kite_set_priority(session, KITE_PRIORITY_LOW);

	if (!err)
		err = kite_map(session, region, KITE_WRITE, &handle, NULL);
	if (!err)
		schedule_work(&write_work);
	return err;
}

static int __init kite_background_init(void)
{
	int err;

	data = kzalloc(SZ_64K, GFP_KERNEL);
	if (!data)
		return -ENOMEM;
	session = kite_open(NULL);
	err = IS_ERR(session) ? PTR_ERR(session) : start_writing();
	if (err) {
		if (!IS_ERR(session))
			kite_close(session);
		kfree(data);
	}
	return err;
}
module_init(kite_background_init);

static void __exit kite_background_exit(void)
{
	cancel_work_sync(&write_work);
	kite_close(session);
	kfree(data);
}
module_exit(kite_background_exit);

MODULE_DESCRIPTION("Writes with low priority");
MODULE_AUTHOR("The kite developers");
MODULE_LICENSE("GPL");
