// SPDX-License-Identifier: GPL-2.0
/*
 * Two kernels communicate by a virtual queue pair: one lends memory; the other one reads, writes,
 * adds and swaps there, one request at a time and two at once, and then sends a message.
 *
 *	insmod kite_verbs.ko port=9
 *	insmod kite_verbs.ko port=9 node=2
 *
 * The first lends, and waits for the last message of the second, which uses the memory of node 2.
 * Loading runs all steps, and fails with the error of the first step that fails.
 */
#include <linux/completion.h>
#include <linux/module.h>
#include <linux/vmalloc.h>

#include <kite.h>

static uint node;
module_param(node, uint, 0444);
MODULE_PARM_DESC(node, "node that lends memory, or 0 to lend memory (default 0)");

static uint port;
module_param(port, uint, 0444);
MODULE_PARM_DESC(port, "port at which the lender listens");

/* No step expects a timeout. */
#define TIMEOUT_MS 60000

#define MEMORY_BYTES (64 << 10)

/* Offsets in the memory of each side: the message, the words, the written and read data. */
#define MESSAGE_OFFSET 0
#define WORD_OFFSET 4096
#define LOCAL_OFFSET 8192
#define REMOTE_OFFSET (40 << 10)
#define DATA_BYTES (16 << 10)

#define SWAPPED_OFFSET (WORD_OFFSET + 8)

#define IMM_DONE 7
#define IMM_WRITTEN 8

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

static int push(struct kite_send_wr *wr)
{
	struct kite_cqe done = {};
	int err;

	wr->key = key;
	wr->flags |= KITE_WR_FLAG_SIGNALED;
	err = kite_push(session, vqp, wr, 1);
	if (!err)
		err = kite_pop(session, vqp, &done, 1, 0, TIMEOUT_MS);
	if (err < 0)
		return err;
	return -(int)done.error;
}

static int send_message(u32 len, u32 immediate)
{
	struct kite_send_wr wr = {
		.op = KITE_WR_OP_SEND,
		.flags = KITE_WR_FLAG_WITH_IMM,
		.addr = MESSAGE_OFFSET,
		.len = len,
		.operand = immediate,
	};

	return push(&wr);
}

static int recv_message(u32 len, u32 immediate)
{
	struct kite_pop_message message = {
		.vqp = vqp,
		.addr = MESSAGE_OFFSET,
		.key = key,
		.len = len,
		.timeout_ms = TIMEOUT_MS,
	};
	int err = kite_pop_message(session, &message);

	if (err)
		return err;
	return message.len == len && message.immediate == immediate ? 0 : -EBADMSG;
}

static bool is_pattern(const u8 *bytes)
{
	u32 i;

	for (i = 0; i < DATA_BYTES; i++)
		if (bytes[i] != (u8)(i * 7 + i / 256))
			return false;
	return true;
}

/* The side that lends. */

static int lend(void)
{
	struct kite_accept accepted = { .timeout_ms = TIMEOUT_MS };
	int err = kite_listen(session, port, &accepted.listener);

	if (!err)
		err = kite_accept(session, &accepted);
	if (!err)
		err = kite_close_listener(session, accepted.listener);
	if (err)
		return err;
	vqp = accepted.vqp;
	err = recv_message(sizeof(key), 0);
	if (err)
		return err;
	memcpy(memory + MESSAGE_OFFSET, &key, sizeof(key));
	err = send_message(sizeof(key), 0) ?: recv_message(DATA_BYTES, IMM_WRITTEN) ?:
	      recv_message(1, IMM_DONE);
	if (err)
		return err;
	if (*(u64 *)(memory + WORD_OFFSET) != 2 || *(u64 *)(memory + SWAPPED_OFFSET) != 11)
		return -EBADMSG;
	return is_pattern(memory + REMOTE_OFFSET) ? 0 : -EBADMSG;
}

/* The side that uses it. */

static int check_fetch_add(u32 lent_key)
{
	struct kite_send_wr add = {
		.op = KITE_WR_OP_FETCH_ADD,
		.addr = WORD_OFFSET,
		.remote_addr = WORD_OFFSET,
		.remote_key = lent_key,
		.len = 8,
		.operand = 1,
	};
	int err = push(&add) ?: push(&add);

	if (err)
		return err;
	return *(u64 *)(memory + WORD_OFFSET) == 1 ? 0 : -EBADMSG;
}

static int transfer(u16 op, u32 lent_key)
{
	struct kite_send_wr wr = {
		.op = op,
		.addr = LOCAL_OFFSET,
		.remote_addr = REMOTE_OFFSET,
		.remote_key = lent_key,
		.len = DATA_BYTES,
	};

	return push(&wr);
}

/*
 * Pushes a write with an immediate, which has no completion here, and a swap behind a fence, of a
 * word that is 0.
 */
static int push_batch(u32 lent_key)
{
	struct kite_send_wr wrs[] = {
		{
			.op = KITE_WR_OP_WRITE,
			.flags = KITE_WR_FLAG_WITH_IMM,
			.addr = LOCAL_OFFSET,
			.remote_addr = REMOTE_OFFSET,
			.remote_key = lent_key,
			.key = key,
			.len = DATA_BYTES,
			.operand = IMM_WRITTEN,
		},
		{
			.op = KITE_WR_OP_COMPARE_SWAP,
			.flags = KITE_WR_FLAG_SIGNALED | KITE_WR_FLAG_FENCE,
			.tag = 2,
			.addr = SWAPPED_OFFSET,
			.remote_addr = SWAPPED_OFFSET,
			.remote_key = lent_key,
			.key = key,
			.len = 8,
			.operand = 11,
		},
	};
	struct kite_cqe done[2] = {};
	int err = kite_push(session, vqp, wrs, ARRAY_SIZE(wrs));

	if (!err)
		err = kite_pop(session, vqp, done, ARRAY_SIZE(done), 0, TIMEOUT_MS);
	if (err < 0)
		return err;
	if (err != 1 || done[0].tag != 2 || *(u64 *)(memory + SWAPPED_OFFSET))
		return -EBADMSG;
	return -(int)done[0].error;
}

/* Requests to a closed queue pair and a deregistered key must fail. */
static int check_teardown(void)
{
	int err;

	if (kite_close_listener(session, vqp) != -EBADF)
		return -EBADMSG;
	err = kite_close_vqp(session, vqp) ?: kite_dereg_mr(session, key);
	if (err)
		return err;
	if (kite_close_vqp(session, vqp) != -EBADF || kite_dereg_mr(session, key) != -EBADF)
		return -EBADMSG;
	return send_message(1, IMM_DONE) == -EBADF ? 0 : -EBADMSG;
}

static int use_memory(void)
{
	u32 lent_key, i;
	int err = kite_connect(session, node, port, 0, &vqp);

	if (!err)
		err = send_message(sizeof(key), 0) ?: recv_message(sizeof(key), 0);
	if (err)
		return err;
	memcpy(&lent_key, memory + MESSAGE_OFFSET, sizeof(lent_key));
	for (i = 0; i < DATA_BYTES; i++)
		memory[LOCAL_OFFSET + i] = i * 7 + i / 256;
	err = push_batch(lent_key) ?: check_fetch_add(lent_key);
	if (err)
		return err;
	memset(memory + LOCAL_OFFSET, 0, DATA_BYTES);
	err = transfer(KITE_WR_OP_READ, lent_key);
	if (err)
		return err;
	if (!is_pattern(memory + LOCAL_OFFSET))
		return -EBADMSG;
	/* A request with an unknown key fails alone. */
	if (transfer(KITE_WR_OP_READ, lent_key ^ (1 << 20)) != -ENOENT)
		return -EBADMSG;
	return send_message(1, IMM_DONE) ?: check_teardown();
}

static int __init kite_verbs_init(void)
{
	int err;

	session = kite_open(NULL);
	if (IS_ERR(session))
		return PTR_ERR(session);
	memory = vzalloc(MEMORY_BYTES);
	err = memory ? kite_reg_mr(session, memory, MEMORY_BYTES, 0, release, memory, &key) :
		       -ENOMEM;
	if (!err)
		err = node ? use_memory() : lend();
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

MODULE_DESCRIPTION("Communicates by a virtual queue pair");
MODULE_AUTHOR("The kite developers");
MODULE_LICENSE("GPL");
