// SPDX-License-Identifier: GPL-2.0
/*
 * Breaks one rule of the kernel on load, which a checker of the debug kernel reports:
 *
 *	insmod kite_faulty.ko fault=sleep
 *
 * A kernel without checkers does not report most of these faults, and some of them corrupt memory.
 */
#include <linux/list.h>
#include <linux/module.h>
#include <linux/mutex.h>
#include <linux/slab.h>
#include <linux/spinlock.h>
#include <linux/string.h>
#include <linux/timer.h>

static char *fault = "";
module_param(fault, charp, 0444);
MODULE_PARM_DESC(fault, "sleep, slab, list, object, leak or lock");

static DEFINE_SPINLOCK(spin);
static DEFINE_MUTEX(first);
static DEFINE_MUTEX(second);

static int sleep_in_atomic(void)
{
	spin_lock(&spin);
	kfree(kmalloc(8, GFP_KERNEL));
	spin_unlock(&spin);
	return 0;
}

static int write_beyond_an_object(void)
{
	size_t len = 64;
	u8 *object = kmalloc(len, GFP_KERNEL);

	if (!object)
		return -ENOMEM;
	/* Prevents a warning of the compiler. */
	OPTIMIZER_HIDE_VAR(len);
	object[len] = 1;
	kfree(object);
	return 0;
}

static int delete_twice(void)
{
	struct list_head entry;
	LIST_HEAD(list);

	list_add(&entry, &list);
	list_del(&entry);
	list_del(&entry);
	return 0;
}

static void timer_fn(struct timer_list *timer)
{
}

static int free_a_running_timer(void)
{
	struct timer_list *timer = kmalloc(sizeof(*timer), GFP_KERNEL);

	if (!timer)
		return -ENOMEM;
	timer_setup(timer, timer_fn, 0);
	mod_timer(timer, jiffies + 3600 * HZ);
	/* The checker removes the timer from its list before the memory is freed. */
	kfree(timer);
	return 0;
}

static int leak_an_object(void)
{
	void *object = kmalloc(2048, GFP_KERNEL);

	/* Prevents the compiler from dropping the call. */
	OPTIMIZER_HIDE_VAR(object);
	return object ? 0 : -ENOMEM;
}

static int lock_in_both_orders(void)
{
	mutex_lock(&first);
	mutex_lock(&second);
	mutex_unlock(&second);
	mutex_unlock(&first);

	mutex_lock(&second);
	mutex_lock(&first);
	mutex_unlock(&first);
	mutex_unlock(&second);
	return 0;
}

static const struct {
	const char *name;
	int (*run)(void);
} faults[] = {
	{ "sleep", sleep_in_atomic },
	{ "slab", write_beyond_an_object },
	{ "list", delete_twice },
	{ "object", free_a_running_timer },
	{ "leak", leak_an_object },
	{ "lock", lock_in_both_orders },
};

static int __init kite_faulty_init(void)
{
	size_t i;

	for (i = 0; i < ARRAY_SIZE(faults); i++)
		if (!strcmp(fault, faults[i].name))
			return faults[i].run();
	return -EINVAL;
}

static void __exit kite_faulty_exit(void)
{
}

module_init(kite_faulty_init);
module_exit(kite_faulty_exit);
MODULE_DESCRIPTION("Faults for a debug kernel to report");
MODULE_LICENSE("GPL");
