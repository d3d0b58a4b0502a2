// SPDX-License-Identifier: GPL-2.0
/*
 * Acquires a lock of a region, and releases it on unload.
 *
 *	insmod kite_lock.ko region=NAME lock=NUMBER
 *
 * With count=N the module first arrives at the barrier of the same number, which has N
 * participants. With keep=1 the module does not release the lock: the lock ends with the session.
 */
#include <linux/module.h>

#include <kite.h>

static char *region;
module_param(region, charp, 0444);
MODULE_PARM_DESC(region, "name of a region");

static ulong lock;
module_param(lock, ulong, 0444);
MODULE_PARM_DESC(lock, "number of the lock and of the barrier");

static uint count;
module_param(count, uint, 0444);
MODULE_PARM_DESC(count, "participants of the barrier (default 0: no barrier)");

static bool keep;
module_param(keep, bool, 0444);
MODULE_PARM_DESC(keep, "do not release the lock on unload (default no)");

/* No test expects a timeout. */
#define TIMEOUT_MS 60000

static struct kite_session *session;
static u64 held_lock;

static int acquire_lock(void)
{
	u64 handle, generation;
	int err = kite_map(session, region, KITE_WRITE, &handle, NULL);

	if (!err && count)
		err = kite_barrier(session, handle, lock, count, TIMEOUT_MS, &generation);
	if (!err)
		err = kite_lock(session, handle, lock, 0, TIMEOUT_MS, &held_lock);
	if (err < 0)
		return err;
	pr_info("has the lock of %s%s\n", region, err ? ", warned" : "");
	return 0;
}

static int __init kite_lock_init(void)
{
	int err;

	session = kite_open(NULL);
	if (IS_ERR(session))
		return PTR_ERR(session);
	err = acquire_lock();
	if (err)
		kite_close(session);
	return err;
}
module_init(kite_lock_init);

static void __exit kite_lock_exit(void)
{
	int err = keep ? 0 : kite_unlock(session, held_lock, 0);

	if (err)
		pr_info("the lock had ended: %d\n", err);
	kite_close(session);
}
module_exit(kite_lock_exit);

MODULE_DESCRIPTION("Holds a lock of a region");
MODULE_AUTHOR("The kite developers");
MODULE_LICENSE("GPL");
