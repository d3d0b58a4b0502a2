// SPDX-License-Identifier: GPL-2.0
/*
 * A sample module with an I/O queue. It writes patterns to a region of a node, many requests at a
 * time, and reads them back. Then it is server and caller of one call. From then on, until unload,
 * the completion of each write submits the next; /sys/module/kite_queue/parameters has their number
 * and the error that ended them.
 *
 *	insmod kite_queue.ko node=2
 *
 * With silent=REGION the module also calls function 2 of the server of that region, which never
 * replies, and cancels the calls.
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
MODULE_PARM_DESC(silent, "region whose server replies to no call of function 2 (default none)");

static ulong writes;
module_param(writes, ulong, 0444);
MODULE_PARM_DESC(writes, "completed writes");

static int ended;
module_param(ended, int, 0444);
MODULE_PARM_DESC(ended, "error that ended the writes, or 0 while they continue");

/* Requests in flight, and requests of a check. */
#define QUEUE_ENTRIES 32
#define NUM_REQUESTS 1000

/* Bytes of a request. */
#define REQUEST_BYTES 64

static struct kite_session *session;
static struct kite_queue *queue;
static u64 region;
static u8 *memory;

/* Completions since the last wait_completions(). */
static struct {
	wait_queue_head_t wait;
	/* Protects the rest. */
	spinlock_t lock;
	uint done;
	uint failed;
	int error;
} progress;

static u8 pattern(u64 tag)
{
	return tag * 7 + 1;
}

static struct kite_sqe request(u32 number, u64 tag, const void *body, size_t size)
{
	struct kite_sqe submission = { .tag = tag, .request = number };

	memcpy(submission.body, body, size);
	return submission;
}

/* Returns a read or write of part @tag of the region, to or from part @tag of memory. */
static struct kite_sqe access_request(u32 number, u64 tag, u64 handle)
{
	struct kite_rw rw = {
		.handle = handle,
		.offset = tag * REQUEST_BYTES,
		.addr = (uintptr_t)(memory + tag * REQUEST_BYTES),
		.len = REQUEST_BYTES,
	};

	return request(number, tag, &rw, sizeof(rw));
}

static void on_completion(void *context, u64 tag, int error, u64 value)
{
	spin_lock(&progress.lock);
	progress.done++;
	if (error) {
		progress.failed++;
		progress.error = error;
	}
	spin_unlock(&progress.lock);
	wake_up(&progress.wait);
}

/* Submits a request, and waits for a free entry before that. */
static int submit(const struct kite_sqe *submission)
{
	uint old_done;
	int err;

	for (;;) {
		old_done = READ_ONCE(progress.done);
		err = kite_submit(queue, submission);
		if (err != -EAGAIN)
			return err;
		wait_event(progress.wait, READ_ONCE(progress.done) != old_done);
	}
}

/* Waits for @done completions, of which @failed must have failed. Stores the last error. */
static int wait_completions(uint done, uint failed, int *error)
{
	int err;

	wait_event(progress.wait, READ_ONCE(progress.done) >= done);
	spin_lock(&progress.lock);
	err = progress.done == done && progress.failed == failed ? 0 : -EBADMSG;
	*error = progress.error;
	progress.done = 0;
	progress.failed = 0;
	progress.error = 0;
	spin_unlock(&progress.lock);
	return err;
}

static int access_all(u32 number)
{
	struct kite_sqe submission;
	int err = 0, error;
	u64 tag;

	for (tag = 0; !err && tag < NUM_REQUESTS; tag++) {
		submission = access_request(number, tag, region);
		err = submit(&submission);
	}
	return wait_completions(tag, 0, &error) ?: err;
}

static int check_bytes(void)
{
	u64 tag, i;
	int err;

	for (tag = 0; tag < NUM_REQUESTS; tag++)
		memset(memory + tag * REQUEST_BYTES, pattern(tag), REQUEST_BYTES);
	err = access_all(KITE_IOC_WRITE);
	memset(memory, 0, NUM_REQUESTS * REQUEST_BYTES);
	if (!err)
		err = access_all(KITE_IOC_READ);
	for (tag = 0; !err && tag < NUM_REQUESTS; tag++) {
		for (i = 0; i < REQUEST_BYTES; i++) {
			if (memory[tag * REQUEST_BYTES + i] != pattern(tag))
				err = -EBADMSG;
		}
	}
	return err;
}

/* Submits a request that must complete with an error. */
static int expect_error(struct kite_sqe submission, int expected)
{
	int error, err = submit(&submission) ?: wait_completions(1, 1, &error);

	return err ?: error == expected ? 0 : -EBADMSG;
}

static int check_refusals(void)
{
	int err = expect_error(access_request(KITE_IOC_WRITE, 0, region + 1), -EBADF);

	if (!err)
		err = expect_error(access_request(KITE_IOC_WRITE, NUM_REQUESTS, region), -ERANGE);
	if (!err)
		err = expect_error(access_request(KITE_IOC_ALLOC, 0, region), -ENOTTY);
	if (!err && kite_cancel(queue, 1) != -ENOENT)
		err = -EBADMSG;
	if (!err && kite_queue_open(session, 3, on_completion, NULL) != ERR_PTR(-EINVAL))
		err = -EBADMSG;
	if (!err && kite_queue_open(session, 4, NULL, NULL) != ERR_PTR(-EINVAL))
		err = -EBADMSG;
	return err;
}

/* Replies to the received call with its data reversed. A second reply to it must fail. */
static int serve_call(void)
{
	struct kite_recv_header *incoming = (void *)memory;
	u8 *data = (u8 *)(incoming + 1);
	struct kite_reply reply = {
		.call = incoming->call,
		.addr = (uintptr_t)data,
		.len = REQUEST_BYTES,
	};
	struct kite_sqe submission = request(KITE_IOC_REPLY, 2, &reply, sizeof(reply));
	int err, error, i;

	if (incoming->function != 7 || incoming->len != REQUEST_BYTES || incoming->uid != 0)
		return -EBADMSG;
	for (i = 0; i < REQUEST_BYTES / 2; i++)
		swap(data[i], data[REQUEST_BYTES - 1 - i]);
	err = submit(&submission);
	/* The completions of the reply and of the call. */
	err = wait_completions(2, 0, &error) ?: err;
	return err ?: expect_error(submission, -EBADF);
}

/* Serves a region of this node, and calls its server. */
static int check_serving(void)
{
	struct kite_receive receive = { .addr = (uintptr_t)memory, .len = REQUEST_BYTES };
	u8 *data = memory + PAGE_SIZE, *reply = data + REQUEST_BYTES;
	struct kite_call call = {
		.addr = (uintptr_t)data,
		.len = REQUEST_BYTES,
		.reply = (uintptr_t)reply,
		.reply_len = REQUEST_BYTES,
		.function = 7,
	};
	struct kite_sqe submission;
	int err, error, i;

	err = kite_alloc(session, NULL, PAGE_SIZE, NULL, 0, 0, &call.handle);
	if (err)
		return err;
	receive.handle = call.handle;
	submission = request(KITE_IOC_RECEIVE, 0, &receive, sizeof(receive));
	err = expect_error(submission, -EOPNOTSUPP) ?: kite_serve(session, call.handle, 0, 0);
	err = err ?: submit(&submission);
	if (err)
		return err;
	for (i = 0; i < REQUEST_BYTES; i++)
		data[i] = pattern(i);
	submission = request(KITE_IOC_CALL, 1, &call, sizeof(call));
	err = submit(&submission);
	err = wait_completions(1, 0, &error) ?: err ?: serve_call();
	for (i = 0; !err && i < REQUEST_BYTES; i++) {
		if (reply[i] != pattern(REQUEST_BYTES - 1 - i))
			err = -EBADMSG;
	}
	return err ?: kite_free(session, call.handle);
}

/* Calls a server that does not reply, cancels one call, and closes the queue under the others. */
static int check_calls(void)
{
	struct kite_call call = { .function = 2, .addr = (uintptr_t)memory, .len = REQUEST_BYTES };
	struct kite_sqe submission;
	int err, error;
	u64 tag, len;

	err = kite_map(session, silent, KITE_WRITE, &call.handle, &len);
	/* The queue accepts QUEUE_ENTRIES calls in flight, and as many that wait. */
	for (tag = 0; !err && tag < 2 * QUEUE_ENTRIES; tag++) {
		submission = request(KITE_IOC_CALL, tag, &call, sizeof(call));
		do {
			cond_resched();
			err = kite_submit(queue, &submission);
		} while (err == -EAGAIN);
	}
	if (err)
		return err;
	if (kite_submit(queue, &submission) != -EAGAIN)
		return -EBADMSG;
	/* A call that is being sent cannot be cancelled. */
	do {
		cond_resched();
		err = kite_cancel(queue, 5);
	} while (err == -ENOENT);
	err = err ?: wait_completions(1, 1, &error);
	kite_queue_close(queue);
	queue = NULL;
	if (!err && error != -ECANCELED)
		err = -EBADMSG;
	err = wait_completions(2 * QUEUE_ENTRIES - 1, 2 * QUEUE_ENTRIES - 1, &error) ?: err;
	if (!err && error != -ECANCELED)
		err = -EBADMSG;
	return err;
}

static void write_again(void *context, u64 tag, int error, u64 value)
{
	struct kite_sqe next = access_request(KITE_IOC_WRITE, tag, region);

	if (!error) {
		spin_lock(&progress.lock);
		writes++;
		spin_unlock(&progress.lock);
		error = kite_submit(queue, &next);
	}
	if (error)
		WRITE_ONCE(ended, error);
}

/* Starts writes, each of which submits the next on completion. */
static int start_endless_writes(void)
{
	struct kite_sqe submission;
	u64 tag;
	int err = 0;

	/* Completions use the variable, so it is set before the first write. */
	queue = kite_queue_open(session, QUEUE_ENTRIES, write_again, NULL);
	if (IS_ERR(queue))
		return PTR_ERR(queue);
	for (tag = 0; !err && tag < QUEUE_ENTRIES / 2; tag++) {
		submission = access_request(KITE_IOC_WRITE, tag, region);
		err = kite_submit(queue, &submission);
	}
	return err;
}

static int run_checks(void)
{
	const u32 nodes[] = { node };
	int err = kite_alloc(session, NULL, NUM_REQUESTS * REQUEST_BYTES, nodes, !!node, 0,
			     &region);

	if (err)
		return err;
	queue = kite_queue_open(session, QUEUE_ENTRIES, on_completion, NULL);
	if (IS_ERR(queue))
		return PTR_ERR(queue);
	err = check_bytes();
	if (!err)
		err = check_refusals();
	if (!err)
		err = check_serving();
	if (!err && *silent)
		err = check_calls();
	if (queue)
		kite_queue_close(queue);
	queue = NULL;
	return err ?: start_endless_writes();
}

static void kite_queue_exit(void)
{
	if (!IS_ERR_OR_NULL(queue))
		kite_queue_close(queue);
	kite_close(session);
	kvfree(memory);
}

static int __init kite_queue_init(void)
{
	int err;

	init_waitqueue_head(&progress.wait);
	spin_lock_init(&progress.lock);
	memory = kvmalloc(NUM_REQUESTS * REQUEST_BYTES, GFP_KERNEL);
	if (!memory)
		return -ENOMEM;
	session = kite_open(NULL);
	if (IS_ERR(session)) {
		kvfree(memory);
		return PTR_ERR(session);
	}
	err = run_checks();
	if (err)
		kite_queue_exit();
	return err;
}
module_init(kite_queue_init);
module_exit(kite_queue_exit);

MODULE_AUTHOR("The kite authors");
MODULE_DESCRIPTION("Sample of a module with an I/O queue of kite");
MODULE_LICENSE("GPL");
