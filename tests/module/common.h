/* SPDX-License-Identifier: GPL-2.0 */
/* Helpers that several test modules share. */
#ifndef _KITE_TEST_COMMON_H
#define _KITE_TEST_COMMON_H

#include <linux/errno.h>
#include <linux/minmax.h>
#include <linux/printk.h>
#include <linux/sort.h>
#include <linux/types.h>

/**
 * struct test - one case of a module.
 * @name: name of the case in the log; NULL ends a list of cases.
 * @run: runs the case. Returns 0 or a negative errno.
 */
struct test {
	const char *name;
	int (*run)(void);
};

/* Logs the result of a case. Returns @err. */
static inline int report_case(const char *subject, const char *name, int err)
{
	if (err)
		pr_err("%s, %s: error %d\n", subject, name, err);
	else
		pr_info("%s, %s: ok\n", subject, name);
	return err;
}

/* Returns -EBADMSG, the error of a wrong result, unless the condition holds. */
static inline int expect_true(bool condition)
{
	return condition ? 0 : -EBADMSG;
}

static inline int cmp_u64(const void *a, const void *b)
{
	return cmp_int(*(const u64 *)a, *(const u64 *)b);
}

/* Sorts @count times. Returns the median. */
static inline u64 median_of(u64 *times, size_t count)
{
	sort(times, count, sizeof(*times), cmp_u64, NULL);
	return times[count / 2];
}

#endif /* _KITE_TEST_COMMON_H */
