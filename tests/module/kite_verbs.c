// SPDX-License-Identifier: GPL-2.0
/*
 * Two kernels talk by a virtual queue pair: one lends memory, and the other reads, writes, counts
 * and swaps there, one thing at a time and several at once, and says when it is done.
 *
 *	insmod kite_verbs.ko port=9
 *	insmod kite_verbs.ko port=9 node=2
 *
 * The first lends, and waits until somebody is done; the second uses what node 2 lends.
 * Loading does it all, and fails with the error of what is not as it should be.
 */
#include <linux/completion.h>
#include <linux/module.h>
#include <linux/vmalloc.h>

#include <kite.h>

static uint node;
module_param(node, uint, 0444);
MODULE_PARM_DESC(node, "the node that lends memory, or 0 to lend some");

static uint port;
module_param(port, uint, 0444);
MODULE_PARM_DESC(port, "where it listens");

/* Nothing here is about time. */
#define PATIENCE_MS 60000

#define SIZE (64 << 10)

/* Places in the memory of each side: of a message, and of what is written and read. */
#define MESSAGE_AT 0
#define WORD_AT 4096
#define HERE_AT 8192
#define THERE_AT (40 << 10)
#define BYTES (16 << 10)

#define SWAPPED_AT (WORD_AT + 8)

#define DONE 7
#define WRITTEN 8

static struct kite_session *session;
static u8 *memory;
static u32 key;
static u64 vqp;
static DECLARE_COMPLETION(released);

static void release(void *context)
{
	vfree(context);
	complete(&released);
}

static int push(struct kite_work *work)
{
	struct kite_completion done = {};
	int err;

	work->key = key;
	work->flags |= KITE_VQP_SIGNALED;
	err = kite_push(session, vqp, work, 1);
	if (!err)
		err = kite_pop(session, vqp, &done, 1, PATIENCE_MS);
	if (err < 0)
		return err;
	return -(int)done.error;
}

static int say(u32 len, u32 immediate)
{
	struct kite_work work = {
		.op = KITE_VQP_SEND,
		.flags = KITE_VQP_IMMEDIATE,
		.addr = MESSAGE_AT,
		.len = len,
		.operand = immediate,
	};

	return push(&work);
}

static int hear(u32 len, u32 immediate)
{
	struct kite_pop_message message = {
		.vqp = vqp,
		.addr = MESSAGE_AT,
		.key = key,
		.len = len,
		.timeout_ms = PATIENCE_MS,
	};
	int err = kite_pop_message(session, &message);

	if (err)
		return err;
	return message.len == len && message.immediate == immediate ? 0 : -EBADMSG;
}

static bool is_pattern(const u8 *bytes)
{
	u32 i;

	for (i = 0; i < BYTES; i++)
		if (bytes[i] != (u8)(i * 7 + i / 256))
			return false;
	return true;
}

/* The side that lends. */

static int lend(void)
{
	struct kite_accept accepted = { .timeout_ms = PATIENCE_MS };
	int err = kite_listen(session, port, &accepted.listener);

	if (!err)
		err = kite_accept(session, &accepted);
	if (err)
		return err;
	vqp = accepted.vqp;
	err = hear(sizeof(key), 0);
	if (err)
		return err;
	memcpy(memory + MESSAGE_AT, &key, sizeof(key));
	err = say(sizeof(key), 0) ?: hear(BYTES, WRITTEN) ?: hear(1, DONE);
	if (err)
		return err;
	if (*(u64 *)(memory + WORD_AT) != 2 || *(u64 *)(memory + SWAPPED_AT) != 11)
		return -EBADMSG;
	return is_pattern(memory + THERE_AT) ? 0 : -EBADMSG;
}

/* The side that uses it. */

static int count(u32 lent)
{
	struct kite_work add = {
		.op = KITE_VQP_FETCH_ADD,
		.addr = WORD_AT,
		.remote_addr = WORD_AT,
		.remote_key = lent,
		.len = 8,
		.operand = 1,
	};
	int err = push(&add) ?: push(&add);

	if (err)
		return err;
	return *(u64 *)(memory + WORD_AT) == 1 ? 0 : -EBADMSG;
}

static int move(u16 op, u32 lent)
{
	struct kite_work work = {
		.op = op,
		.addr = HERE_AT,
		.remote_addr = THERE_AT,
		.remote_key = lent,
		.len = BYTES,
	};

	return push(&work);
}

/* Writes what the other side is told of, of which nothing is popped, and swaps once it is 0. */
static int several(u32 lent)
{
	struct kite_work works[] = {
		{
			.op = KITE_VQP_WRITE,
			.flags = KITE_VQP_IMMEDIATE,
			.addr = HERE_AT,
			.remote_addr = THERE_AT,
			.remote_key = lent,
			.key = key,
			.len = BYTES,
			.operand = WRITTEN,
		},
		{
			.op = KITE_VQP_COMPARE_SWAP,
			.flags = KITE_VQP_SIGNALED | KITE_VQP_FENCED,
			.tag = 2,
			.addr = SWAPPED_AT,
			.remote_addr = SWAPPED_AT,
			.remote_key = lent,
			.key = key,
			.len = 8,
			.operand = 11,
		},
	};
	struct kite_completion done[2] = {};
	int err = kite_push(session, vqp, works, ARRAY_SIZE(works));

	if (!err)
		err = kite_pop(session, vqp, done, ARRAY_SIZE(done), PATIENCE_MS);
	if (err < 0)
		return err;
	if (err != 1 || done[0].tag != 2 || *(u64 *)(memory + SWAPPED_AT))
		return -EBADMSG;
	return -(int)done[0].error;
}

/* What was given back is known no more. */
static int give_back(void)
{
	int err = kite_disconnect(session, vqp) ?: kite_memory_forget(session, key);

	if (err)
		return err;
	if (kite_disconnect(session, vqp) != -EBADF || kite_memory_forget(session, key) != -EBADF)
		return -EBADMSG;
	return say(1, DONE) == -EBADF ? 0 : -EBADMSG;
}

static int use(void)
{
	u32 lent, i;
	int err = kite_connect(session, node, port, 0, &vqp);

	if (!err)
		err = say(sizeof(key), 0) ?: hear(sizeof(key), 0);
	if (err)
		return err;
	memcpy(&lent, memory + MESSAGE_AT, sizeof(lent));
	for (i = 0; i < BYTES; i++)
		memory[HERE_AT + i] = i * 7 + i / 256;
	err = several(lent) ?: count(lent);
	if (err)
		return err;
	memset(memory + HERE_AT, 0, BYTES);
	err = move(KITE_VQP_READ, lent);
	if (err)
		return err;
	if (!is_pattern(memory + HERE_AT))
		return -EBADMSG;
	/* What does not belong to it is refused, and harms nobody. */
	if (move(KITE_VQP_READ, lent ^ (1 << 20)) != -ENOENT)
		return -EBADMSG;
	return say(1, DONE) ?: give_back();
}

static int __init kite_verbs_init(void)
{
	int err;

	session = kite_open(NULL);
	if (IS_ERR(session))
		return PTR_ERR(session);
	memory = vzalloc(SIZE);
	err = memory ? kite_memory_register(session, memory, SIZE, 0, release, memory, &key) :
		       -ENOMEM;
	if (!err)
		err = node ? use() : lend();
	kite_close(session);
	if (memory)
		wait_for_completion(&released);
	if (!err)
		pr_info("all is well\n");
	return err;
}
module_init(kite_verbs_init);

static void __exit kite_verbs_exit(void)
{
}
module_exit(kite_verbs_exit);

MODULE_DESCRIPTION("Talks by a virtual queue pair");
MODULE_AUTHOR("The kite developers");
MODULE_LICENSE("GPL");
