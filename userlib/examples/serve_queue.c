// SPDX-License-Identifier: GPL-2.0 OR MIT
/*
 * Server and client in one thread: one I/O queue sends, receives and replies to calls with
 * numbers. The replies are the squares.
 * cc serve_queue.c $(pkg-config --cflags --libs libkite)
 */
#include <kite/lite.h>
#include <stdio.h>
#include <string.h>

#define COUNT 8
#define RECEIVES 2

/* Tags: first those of receives, then of replies, then of calls. */
#define REPLIES RECEIVES
#define CALLS (REPLIES + RECEIVES)

/* Buffer of a receive, or of a call. */
struct slot {
	char head[LT_HEAD];
	uint64_t number;
	uint64_t reply;
};

static LT_lh lh;
static int64_t queue;
static struct slot *slots;

static int receive(uint64_t tag)
{
	return LT_async_recvRPC(queue, tag, lh, &slots[tag], LT_HEAD + sizeof(uint64_t));
}

static int call(uint64_t n)
{
	struct slot *slot = &slots[CALLS + n];

	slot->number = n;
	return LT_async_RPC(queue, CALLS + n, lh, 0, &slot->number, sizeof(n), &slot->reply,
			    sizeof(n));
}

static int reply_to(uint64_t tag)
{
	struct slot *slot = &slots[tag];
	struct LT_call call;
	int64_t size = LT_received(queue, lh, slot, &call);

	if (size < 0)
		return size;
	slot->number *= slot->number;
	return LT_async_replyRPC(queue, REPLIES + tag, call.id, &slot->number, size);
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
		else if (done.tag >= REPLIES)
			err = receive(done.tag - REPLIES);
		else
			err = reply_to(done.tag);
	}
	return err;
}

int main(void)
{
	uint32_t node = 0;
	int own = LT_join(NULL);
	int err;

	lh = own < 0 ? own : LT_malloc(&node, 0, 1, NULL, 0);
	queue = lh < 0 ? lh : LT_queue(16, (CALLS + COUNT) * sizeof(*slots), (void **)&slots);
	err = queue < 0 ? (int)queue : run();
	if (err) {
		fprintf(stderr, "serve_queue: %s\n", strerror(-err));
		return 1;
	}
	for (int n = 0; n < COUNT; n++)
		printf("%s%llu", n ? ", " : "[", (unsigned long long)slots[CALLS + n].reply);
	printf("]\n");
	return LT_unqueue(queue) < 0 || LT_free(lh) < 0;
}
