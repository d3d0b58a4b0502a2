// SPDX-License-Identifier: GPL-2.0
/*
 * Uses kite from the kernel: allocates a region on a node, writes it, reads it back in small and
 * large parts, also through another handle, and frees it. Invalid requests must fail. Loading runs
 * all checks, and fails with the error of the first check that fails. A loaded module does nothing
 * more, and can be unloaded at any time.
 *
 *	insmod kite_user.ko node=2 len=9000001
 *
 * With greet=1 the module runs the sample of README.md instead, which leaves a region.
 */
#include <linux/completion.h>
#include <linux/module.h>
#include <linux/slab.h>
#include <linux/vmalloc.h>

#include <kite.h>

static uint node;
module_param(node, uint, 0444);
MODULE_PARM_DESC(node, "node that lends the memory, 0 for this one (default 0)");

static ulong len = (8 << 20) + 1;
module_param(len, ulong, 0444);
MODULE_PARM_DESC(len, "bytes of the region (default 8 MiB + 1)");

static bool greets;
module_param_named(greet, greets, bool, 0444);
MODULE_PARM_DESC(greet, "run the sample of README.md, which needs a node 2 (default no)");

#define NAME "kite_user"

/* The sample, which Kbuild extracts from README.md. */
#include "readme.h"

static void fill(u8 *buf, size_t size)
{
	size_t i;

	for (i = 0; i < size; i++)
		buf[i] = (i >> 12) + i * 7;
}

/* Writes @data, which is vmalloc() memory, and its first bytes again from kmalloc() memory. */
static int write_all(struct kite_session *session, u64 handle, const u8 *data)
{
	size_t small = min_t(size_t, len, 64);
	u8 *head = kmemdup(data, small, GFP_KERNEL);
	int err;

	if (!head)
		return -ENOMEM;
	err = kite_write(session, handle, 0, data, len);
	if (!err)
		err = kite_write(session, handle, 0, head, small);
	kfree(head);
	return err;
}

/* Writes and reads @data in three vectors: the second half, the first half, and an empty one. */
static int check_vectors(struct kite_session *session, u64 handle, u8 *data, u8 *copy)
{
	size_t half = len / 2;
	struct kite_vector vectors[] = {
		{ .offset = half, .buf = data + half, .len = len - half },
		{ .offset = 0, .buf = data, .len = half },
		{ .offset = len },
	};
	int err = kite_writev(session, handle, vectors, ARRAY_SIZE(vectors));

	vectors[0].buf = copy + half;
	vectors[1].buf = copy;
	if (!err)
		err = kite_readv(session, handle, vectors, ARRAY_SIZE(vectors));
	if (!err && memcmp(data, copy, len))
		err = -EBADMSG;
	memset(copy, 0, len);
	vectors[2].len = 1;
	if (!err && kite_readv(session, handle, vectors, ARRAY_SIZE(vectors)) != -ERANGE)
		err = -EBADMSG;
	return err;
}

/* Maps the region by its name, reads it, and compares. */
static int check(struct kite_session *session, const u8 *data, u8 *copy)
{
	u64 handle, size;
	int err;

	err = kite_map(session, NAME, KITE_READ, &handle, &size);
	if (err)
		return err;
	err = size == len ? kite_read(session, handle, 0, copy, len) : -EBADMSG;
	if (!err && memcmp(data, copy, len))
		err = -EBADMSG;
	/* The handle permits reads alone, and none beyond the region. */
	if (!err && kite_write(session, handle, 0, copy, 1) != -EACCES)
		err = -EBADMSG;
	if (!err && kite_read(session, handle, len, copy, 1) != -ERANGE)
		err = -EBADMSG;
	kite_unmap(session, handle);
	return err;
}

/* Adds to the first word and swaps it. The word has its value again at the end. */
static int check_atomics(struct kite_session *session, u64 handle)
{
	u64 first, value;
	int err;

	if (len < sizeof(u64))
		return 0;
	err = kite_atomic(session, handle, 0, KITE_ATOMIC_FETCH_ADD, 1, 0, &first);
	if (!err)
		err = kite_atomic(session, handle, 0, KITE_ATOMIC_COMPARE_SWAP, 7, first + 1, NULL);
	if (!err)
		err = kite_atomic(session, handle, 0, KITE_ATOMIC_SWAP, first, 0, &value);
	if (!err && value != 7)
		err = -EBADMSG;
	if (!err && kite_atomic(session, handle, 4, KITE_ATOMIC_SWAP, 0, 0, NULL) != -EINVAL)
		err = -EBADMSG;
	return err;
}

/* Fills and copies the second half, which has its contents again at the end. */
static int check_copies(struct kite_session *session, u64 handle)
{
	u64 half = len / 2, copy_handle;
	static u8 last;
	int err = kite_alloc(session, NULL, len, NULL, 0, 0, &copy_handle);

	if (err)
		return err;
	err = kite_copy(session, copy_handle, 0, handle, half, len - half);
	if (!err)
		err = kite_fill(session, handle, half, 0xa5, len - half);
	if (!err)
		err = kite_read(session, handle, len - 1, &last, 1);
	if (!err && last != 0xa5)
		err = -EBADMSG;
	if (!err)
		err = kite_copy(session, handle, half, copy_handle, 0, len - half);
	if (!err && kite_fill(session, handle, len, 0, 1) != -ERANGE)
		err = -EBADMSG;
	return kite_unmap(session, copy_handle) ?: err;
}

static void released(void *context)
{
	complete(context);
}

/* Writes to a registered region change this module's memory, until kite releases it. */
static int check_registered(struct kite_session *session)
{
	DECLARE_COMPLETION_ONSTACK(released_once);
	DECLARE_COMPLETION_ONSTACK(unaligned_released);
	u8 *memory = vmalloc(2 * PAGE_SIZE);
	u64 handle;
	int err, registered;

	if (!memory)
		return -ENOMEM;
	registered = kite_register(session, memory, PAGE_SIZE + 7, NULL, 0, released,
				   &released_once, &handle);
	err = registered;
	if (!err)
		err = kite_fill(session, handle, 0, 0x5a, PAGE_SIZE + 7);
	if (!err && (memory[0] != 0x5a || memory[PAGE_SIZE + 6] != 0x5a))
		err = -EBADMSG;
	if (!err && kite_fill(session, handle, PAGE_SIZE + 7, 0, 1) != -ERANGE)
		err = -EBADMSG;
	if (!err && completion_done(&released_once))
		err = -EBADMSG;
	if (!registered)
		err = kite_free(session, handle) ?: err;
	wait_for_completion(&released_once);
	if (!err && kite_register(session, memory + 1, 1, NULL, 0, released, &unaligned_released,
				  &handle) != -EINVAL)
		err = -EBADMSG;
	if (!err && !completion_done(&unaligned_released))
		err = -EBADMSG;
	vfree(memory);
	return err;
}

/* Regions with the name "" are anonymous: several can exist, and none can be mapped. */
static int check_anonymous(struct kite_session *session)
{
	u64 first, second;
	int err;

	err = kite_alloc(session, "", len, &node, 1, KITE_READ, &first);
	if (err)
		return err;
	err = kite_alloc(session, "", 1, NULL, 0, 0, &second);
	if (!err)
		err = kite_unmap(session, second);
	if (!err && kite_map(session, "", KITE_READ, &second, NULL) != -EINVAL)
		err = -EBADMSG;
	return kite_unmap(session, first) ?: err;
}

static int check_refusals(struct kite_session *session)
{
	u64 handle;

	if (kite_alloc(session, NULL, len, NULL, 1, 0, &handle) != -EINVAL)
		return -EBADMSG;
	if (kite_map(session, NULL, KITE_READ, &handle, NULL) != -EINVAL)
		return -EBADMSG;
	if (kite_set_priority(session, KITE_PRIORITY_LOW + 1) != -EINVAL)
		return -EBADMSG;
	return check_registered(session) ?: check_anonymous(session);
}

static int check_region(struct kite_session *session, u8 *data, u8 *copy)
{
	u64 handle;
	int err, freed;

	fill(data, len);
	err = kite_alloc(session, NAME, len, &node, 1, 0, &handle);
	if (err)
		return err;
	err = write_all(session, handle, data) ?: kite_set_priority(session, KITE_PRIORITY_LOW);
	if (!err)
		err = check_vectors(session, handle, data, copy);
	if (!err)
		err = check_atomics(session, handle);
	if (!err)
		err = check_copies(session, handle);
	if (!err)
		err = kite_grant(session, handle, 4321, KITE_READ, 0);
	if (!err)
		err = kite_migrate(session, handle, NULL, 0, 0);
	if (!err && kite_grant(session, handle, 0, KITE_READ, 0) != -EINVAL)
		err = -EBADMSG;
	if (!err)
		err = check(session, data, copy);
	freed = kite_free(session, handle);
	return err ?: freed;
}

static int __init check_all(void)
{
	struct kite_session *session;
	u8 *data = vmalloc(len);
	u8 *copy = vzalloc(len);
	int err = -ENOMEM;

	if (!data || !copy)
		goto out;
	session = kite_open(NULL);
	err = PTR_ERR_OR_ZERO(session);
	if (err)
		goto out;
	err = check_region(session, data, copy) ?: check_refusals(session);
	kite_close(session);
	if (!err)
		pr_info("%lu bytes on node %u: ok\n", len, node);
out:
	vfree(copy);
	vfree(data);
	return err;
}

static int __init kite_user_init(void)
{
	return greets ? greet() : check_all();
}
module_init(kite_user_init);

static void __exit kite_user_exit(void)
{
}
module_exit(kite_user_exit);

MODULE_DESCRIPTION("Uses kite from the kernel");
MODULE_AUTHOR("The kite developers");
MODULE_LICENSE("GPL");
