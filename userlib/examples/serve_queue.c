// SPDX-License-Identifier: GPL-2.0 OR MIT
/*
 * Serves and calls in one thread, which waits for nothing in particular: numbers are sent,
 * received, squared and answered, all by one queue pair.
 * cc serve_queue.c $(pkg-config --cflags --libs libkite)
 */
#include <kite/lite.h>
#include <stdio.h>
#include <string.h>

#define COUNT 8
#define RECEIVES 2

/* Tags: receives are from 0 on, then come the answers to them, and the calls. */
#define ANSWERS RECEIVES
#define CALLS (ANSWERS + RECEIVES)

/* Memory for a receive, or for a call. */
struct part {
	char head[LT_HEAD];
	uint64_t number;
	uint64_t reply;
};

static LT_lh lh;
static int64_t queue;
static struct part *parts;

static int receive(uint64_t tag)
{
	return LT_async_recvRPC(queue, tag, lh, &parts[tag], LT_HEAD + sizeof(uint64_t));
}

static int call(uint64_t n)
{
	struct part *part = &parts[CALLS + n];

	part->number = n;
	return LT_async_RPC(queue, CALLS + n, lh, 0, &part->number, sizeof(n), &part->reply,
			    sizeof(n));
}

static int answer(uint64_t tag)
{
	struct part *part = &parts[tag];
	struct LT_call call;
	int64_t size = LT_received(queue, lh, part, &call);

	if (size < 0)
		return size;
	part->number *= part->number;
	return LT_async_replyRPC(queue, ANSWERS + tag, call.id, &part->number, size);
}

static int run(void)
{
	struct LT_completion done;
	uint64_t squares = 0, tag;
	int err = LT_regRPC(lh, 0, 0);

	for (tag = 0; !err && tag < RECEIVES; tag++)
		err = receive(tag);
	for (tag = 0; !err && tag < COUNT; tag++)
		err = call(tag);
	while (!err && squares < COUNT) {
		err = LT_wait(queue, &done);
		if (!err)
			err = done.status;
		if (err)
			break;
		if (done.tag >= CALLS)
			squares++;
		else if (done.tag >= ANSWERS)
			err = receive(done.tag - ANSWERS);
		else
			err = answer(done.tag);
	}
	return err;
}

int main(void)
{
	uint32_t node = 0;
	int own = LT_join(NULL);
	int err;

	lh = own < 0 ? own : LT_malloc(&node, 0, 1, NULL, 0);
	queue = lh < 0 ? lh : LT_queue(16, (CALLS + COUNT) * sizeof(*parts), (void **)&parts);
	err = queue < 0 ? (int)queue : run();
	if (err) {
		fprintf(stderr, "serve_queue: %s\n", strerror(-err));
		return 1;
	}
	for (int n = 0; n < COUNT; n++)
		printf("%s%llu", n ? ", " : "[", (unsigned long long)parts[CALLS + n].reply);
	printf("]\n");
	return LT_unqueue(queue) < 0 || LT_free(lh) < 0;
}
