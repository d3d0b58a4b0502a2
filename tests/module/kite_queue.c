// SPDX-License-Identifier: GPL-2.0
/*
 * A sample module that has requests done while it goes on: it writes numbers to a region of a
 * node, many at a time, and reads them back; then it takes a call and answers it, as server and
 * caller in one. From then on, until it is unloaded, each write that completes begins the next;
 * /sys/module/kite_queue/parameters says how many there were and what ended them.
 *
 *	insmod kite_queue.ko node=2
 *
 * With silent=REGION it also calls function 2 of who serves that region, which never replies, and
 * gives the calls up.
 */
#include <linux/completion.h>
#include <linux/module.h>
#include <linux/slab.h>
#include <linux/wait.h>

#include <kite.h>

static uint node;
module_param(node, uint, 0444);
MODULE_PARM_DESC(node, "node that lends the memory, 0 for this one (default 0)");

static char *silent = "";
module_param(silent, charp, 0444);
MODULE_PARM_DESC(silent, "a region whose server replies to no call of function 2 (default none)");

static ulong writes;
module_param(writes, ulong, 0444);
MODULE_PARM_DESC(writes, "writes that have completed");

static int ended;
module_param(ended, int, 0444);
MODULE_PARM_DESC(ended, "the error that ended them, or 0 while they go on");

/* Requests under way, and how many there are in all. */
#define ENTRIES 32
#define COUNT 1000

/* Bytes of each. */
#define SIZE 64

static struct kite_session *session;
static struct kite_queue_pair *pair;
static u64 region;
static u8 *memory;

/* What has become of the requests of some phase. */
static struct {
	wait_queue_head_t wait;
	/* Protects the rest. */
	spinlock_t lock;
	uint done;
	uint failed;
	int error;
} phase;

static u8 pattern(u64 tag)
{
	return tag * 7 + 1;
}

static struct kite_submission request(u32 number, u64 tag, const void *body, size_t size)
{
	struct kite_submission submission = { .tag = tag, .request = number };

	memcpy(submission.body, body, size);
	return submission;
}

/* A read or write of the part of the region, and of the memory, of that number. */
static struct kite_submission part(u32 number, u64 tag, u64 handle)
{
	struct kite_rw rw = {
		.handle = handle,
		.offset = tag * SIZE,
		.addr = (uintptr_t)(memory + tag * SIZE),
		.len = SIZE,
	};

	return request(number, tag, &rw, sizeof(rw));
}

static void note(void *context, u64 tag, int error, u64 value)
{
	spin_lock(&phase.lock);
	phase.done++;
	if (error) {
		phase.failed++;
		phase.error = error;
	}
	spin_unlock(&phase.lock);
	wake_up(&phase.wait);
}

/* Has a request done, as soon as there is room for it. */
static int submit(const struct kite_submission *submission)
{
	uint before;
	int err;

	for (;;) {
		before = READ_ONCE(phase.done);
		err = kite_submit(pair, submission);
		if (err != -EAGAIN)
			return err;
		wait_event(phase.wait, READ_ONCE(phase.done) != before);
	}
}

/* Waits for so many completions, of which so many failed, and returns the last error. */
static int outcome(uint done, uint failed, int *error)
{
	int err;

	wait_event(phase.wait, READ_ONCE(phase.done) >= done);
	spin_lock(&phase.lock);
	err = phase.done == done && phase.failed == failed ? 0 : -EBADMSG;
	*error = phase.error;
	phase.done = 0;
	phase.failed = 0;
	phase.error = 0;
	spin_unlock(&phase.lock);
	return err;
}

static int all_parts(u32 number)
{
	struct kite_submission submission;
	int err = 0, error;
	u64 tag;

	for (tag = 0; !err && tag < COUNT; tag++) {
		submission = part(number, tag, region);
		err = submit(&submission);
	}
	return outcome(tag, 0, &error) ?: err;
}

static int check_bytes(void)
{
	u64 tag, i;
	int err;

	for (tag = 0; tag < COUNT; tag++)
		memset(memory + tag * SIZE, pattern(tag), SIZE);
	err = all_parts(KITE_IOC_WRITE);
	memset(memory, 0, COUNT * SIZE);
	if (!err)
		err = all_parts(KITE_IOC_READ);
	for (tag = 0; !err && tag < COUNT; tag++) {
		for (i = 0; i < SIZE; i++) {
			if (memory[tag * SIZE + i] != pattern(tag))
				err = -EBADMSG;
		}
	}
	return err;
}

/* What a submission fails with. */
static int failure(struct kite_submission submission, int expected)
{
	int error, err = submit(&submission) ?: outcome(1, 1, &error);

	return err ?: error == expected ? 0 : -EBADMSG;
}

static int check_refusals(void)
{
	int err = failure(part(KITE_IOC_WRITE, 0, region + 1), -EBADF);

	if (!err)
		err = failure(part(KITE_IOC_WRITE, COUNT, region), -ERANGE);
	if (!err)
		err = failure(part(KITE_IOC_ALLOC, 0, region), -ENOTTY);
	if (!err && kite_cancel(pair, 1) != -ENOENT)
		err = -EBADMSG;
	if (!err && kite_queue_open(session, 3, note, NULL) != ERR_PTR(-EINVAL))
		err = -EBADMSG;
	if (!err && kite_queue_open(session, 4, NULL, NULL) != ERR_PTR(-EINVAL))
		err = -EBADMSG;
	return err;
}

/* Takes the call that was made, and answers it with its data backwards; a second answer is none. */
static int answer(void)
{
	struct kite_incoming *incoming = (void *)memory;
	u8 *data = (u8 *)(incoming + 1);
	struct kite_reply reply = { .call = incoming->call, .addr = (uintptr_t)data, .len = SIZE };
	struct kite_submission submission = request(KITE_IOC_REPLY, 2, &reply, sizeof(reply));
	int err, error, i;

	if (incoming->function != 7 || incoming->len != SIZE || incoming->uid != 0)
		return -EBADMSG;
	for (i = 0; i < SIZE / 2; i++)
		swap(data[i], data[SIZE - 1 - i]);
	err = submit(&submission);
	/* The reply, and the call that it is to. */
	err = outcome(2, 0, &error) ?: err;
	return err ?: failure(submission, -EBADF);
}

/* Serves a region of this node, and calls that. */
static int check_serving(void)
{
	struct kite_receive receive = { .addr = (uintptr_t)memory, .len = SIZE };
	u8 *data = memory + PAGE_SIZE, *reply = data + SIZE;
	struct kite_call call = {
		.addr = (uintptr_t)data,
		.len = SIZE,
		.reply = (uintptr_t)reply,
		.reply_len = SIZE,
		.function = 7,
	};
	struct kite_submission submission;
	int err, error, i;

	err = kite_alloc(session, NULL, PAGE_SIZE, NULL, 0, 0, &call.handle);
	if (err)
		return err;
	receive.handle = call.handle;
	submission = request(KITE_IOC_RECEIVE, 0, &receive, sizeof(receive));
	err = failure(submission, -EOPNOTSUPP) ?: kite_serve(session, call.handle, 0, 0);
	err = err ?: submit(&submission);
	if (err)
		return err;
	for (i = 0; i < SIZE; i++)
		data[i] = pattern(i);
	submission = request(KITE_IOC_CALL, 1, &call, sizeof(call));
	err = submit(&submission);
	err = outcome(1, 0, &error) ?: err ?: answer();
	for (i = 0; !err && i < SIZE; i++) {
		if (reply[i] != pattern(SIZE - 1 - i))
			err = -EBADMSG;
	}
	return err ?: kite_free(session, call.handle);
}

/* Calls who does not reply, gives one of the calls up, and the others with the queue pair. */
static int check_calls(void)
{
	struct kite_call call = { .function = 2, .addr = (uintptr_t)memory, .len = SIZE };
	struct kite_submission submission;
	int err, error;
	u64 tag, len;

	err = kite_map(session, silent, KITE_WRITE, &call.handle, &len);
	/* As many are taken as may be under way, and as many wait for that. */
	for (tag = 0; !err && tag < 2 * ENTRIES; tag++) {
		submission = request(KITE_IOC_CALL, tag, &call, sizeof(call));
		do {
			cond_resched();
			err = kite_submit(pair, &submission);
		} while (err == -EAGAIN);
	}
	if (err)
		return err;
	if (kite_submit(pair, &submission) != -EAGAIN)
		return -EBADMSG;
	/* While it is sent it cannot be given up. */
	do {
		cond_resched();
		err = kite_cancel(pair, 5);
	} while (err == -ENOENT);
	err = err ?: outcome(1, 1, &error);
	kite_queue_close(pair);
	pair = NULL;
	if (!err && error != -ECANCELED)
		err = -EBADMSG;
	err = outcome(2 * ENTRIES - 1, 2 * ENTRIES - 1, &error) ?: err;
	if (!err && error != -ECANCELED)
		err = -EBADMSG;
	return err;
}

static void write_again(void *context, u64 tag, int error, u64 value)
{
	struct kite_submission next = part(KITE_IOC_WRITE, tag, region);

	if (!error) {
		spin_lock(&phase.lock);
		writes++;
		spin_unlock(&phase.lock);
		error = kite_submit(pair, &next);
	}
	if (error)
		WRITE_ONCE(ended, error);
}

/* Writes that go on by themselves. */
static int go_on(void)
{
	struct kite_submission submission;
	u64 tag;
	int err = 0;

	/* Those that have completed find out by which to go on. */
	pair = kite_queue_open(session, ENTRIES, write_again, NULL);
	if (IS_ERR(pair))
		return PTR_ERR(pair);
	for (tag = 0; !err && tag < ENTRIES / 2; tag++) {
		submission = part(KITE_IOC_WRITE, tag, region);
		err = kite_submit(pair, &submission);
	}
	return err;
}

static int run(void)
{
	const u32 nodes[] = { node };
	int err = kite_alloc(session, NULL, COUNT * SIZE, nodes, !!node, 0, &region);

	if (err)
		return err;
	pair = kite_queue_open(session, ENTRIES, note, NULL);
	if (IS_ERR(pair))
		return PTR_ERR(pair);
	err = check_bytes();
	if (!err)
		err = check_refusals();
	if (!err)
		err = check_serving();
	if (!err && *silent)
		err = check_calls();
	if (pair)
		kite_queue_close(pair);
	pair = NULL;
	return err ?: go_on();
}

static void end(void)
{
	if (!IS_ERR_OR_NULL(pair))
		kite_queue_close(pair);
	kite_close(session);
	kvfree(memory);
}

static int __init start(void)
{
	int err;

	init_waitqueue_head(&phase.wait);
	spin_lock_init(&phase.lock);
	memory = kvmalloc(COUNT * SIZE, GFP_KERNEL);
	if (!memory)
		return -ENOMEM;
	session = kite_open(NULL);
	if (IS_ERR(session)) {
		kvfree(memory);
		return PTR_ERR(session);
	}
	err = run();
	if (err)
		end();
	return err;
}
module_init(start);
module_exit(end);

MODULE_AUTHOR("The kite authors");
MODULE_DESCRIPTION("Sample of a module that has requests done by kite while it goes on");
MODULE_LICENSE("GPL");
