// SPDX-License-Identifier: GPL-2.0 OR MIT
/*
 * Test of the waits of the C library: timeouts, signals, and concurrent requests of other threads.
 * Runs on one node, which connects to itself. Prints "passed" at the end.
 */
#include <assert.h>
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <kite/krcore.h>
#include <kite/lite.h>

enum { PORT = 4711, TAG = 7 };

/* Reply buffers whose total size exceeds the maximum memory of an I/O queue. */
enum { CALLS = 150, REPLY_BYTES = 8 << 20 };

static int64_t queue;
static atomic_int interrupted;
static int bound;

static void expect(const char *function, int64_t result, int64_t expected)
{
	if (result == expected)
		return;
	printf("%s: %lld, expected %lld\n", function, (long long)result, (long long)expected);
	exit(1);
}

static void on_signal(int number)
{
	(void)number;
}

/* Waits until a signal ends LT_wait, and then until the request ends. */
static void *wait_twice(void *unused)
{
	struct LT_completion done;

	(void)unused;
	expect("LT_wait with a signal", LT_wait(queue, &done), -EINTR);
	interrupted = 1;
	expect("LT_wait", LT_wait(queue, &done), 0);
	expect("tag", done.tag, TAG);
	expect("status", done.status, -ECANCELED);
	return NULL;
}

static void signal_and_cancel(LT_lh lh, void *memory)
{
	struct sigaction action = { .sa_handler = on_signal };
	struct LT_completion done;
	pthread_t waiter;

	sigaction(SIGUSR1, &action, NULL);
	expect("LT_async_recvRPC", LT_async_recvRPC(queue, TAG, lh, memory, 4096), 0);
	expect("LT_wait_timeout of 0", LT_wait_timeout(queue, &done, 0), -ETIMEDOUT);
	expect("LT_wait_timeout", LT_wait_timeout(queue, &done, 20), -ETIMEDOUT);
	pthread_create(&waiter, NULL, wait_twice, NULL);
	/* Repeat the signal: one that arrives before the thread sleeps does not end the wait. */
	while (!interrupted)
		pthread_kill(waiter, SIGUSR1);
	expect("LT_cancel", LT_cancel(queue, TAG), 1);
	pthread_join(waiter, NULL);
	expect("LT_wait without requests", LT_wait(queue, &done), -EAGAIN);
}

/* Replies to all calls. */
static void *serve(void *lh)
{
	struct LT_call call;
	char data[8];

	for (int i = 0; i < CALLS; i++) {
		expect("LT_recvRPC", LT_recvRPC(*(LT_lh *)lh, &call, data, sizeof(data)), 1);
		expect("LT_replyRPC", LT_replyRPC(call.id, data, 1), 0);
	}
	return NULL;
}

/* All replies use one buffer: they have the same byte and are stored in turn. */
static void multicast(LT_lh lh)
{
	struct LT_reply replies[CALLS];
	LT_lh all[CALLS];
	char *buffer = malloc(REPLY_BYTES);
	pthread_t server;

	for (int i = 0; i < CALLS; i++) {
		all[i] = lh;
		replies[i] = (struct LT_reply){ .data = buffer, .room = REPLY_BYTES };
	}
	pthread_create(&server, NULL, serve, &lh);
	expect("LT_multicast_RPC", LT_multicast_RPC(all, CALLS, 0, "x", 1, replies), 0);
	for (int i = 0; i < CALLS; i++)
		expect("reply", replies[i].result, 1);
	expect("byte", *buffer, 'x');
	pthread_join(server, NULL);
	free(buffer);
}

static void *accept_one(void *unused)
{
	(void)unused;
	return (void *)(intptr_t)kr_accept(bound, -1);
}

/* Accepts and pops with a timeout of 0, and without a timeout. */
static void accept_without_timeout(uint32_t own)
{
	static char byte = 'x';
	struct kr_request request = {
		.op = KR_SEND,
		.flags = KR_SIGNALED,
		.addr = &byte,
		.len = 1,
	};
	struct kr_completion done;
	pthread_t acceptor;
	void *accepted;
	int qd = kr_queue();

	bound = kr_queue();
	expect("kr_bind", kr_bind(bound, PORT), 0);
	expect("kr_accept of 0", kr_accept(bound, 0), -EAGAIN);
	pthread_create(&acceptor, NULL, accept_one, NULL);
	expect("kr_connect", kr_connect(qd, own, PORT), 0);
	expect("kr_reg_mr", kr_reg_mr(&byte, 1, 0, &request.key), 0);
	expect("kr_pop of 0", kr_pop(qd, &done, 1, 0), -EAGAIN);
	expect("kr_push", kr_push(qd, &request, 1), 0);
	expect("kr_pop without timeout", kr_pop(qd, &done, 1, -1), 1);
	pthread_join(acceptor, &accepted);
	assert((intptr_t)accepted > 0);
}

int main(void)
{
	int own = LT_join(NULL);
	uint32_t node = own;
	LT_lh lh = LT_malloc(&node, 1, 4096, "waits", 0);
	void *memory;

	expect("LT_regRPC", LT_regRPC(lh, 0, 0), 0);
	queue = LT_queue(8, 8192, &memory);
	signal_and_cancel(lh, memory);
	multicast(lh);
	accept_without_timeout(own);
	expect("LT_free", LT_free(lh), 0);
	puts("passed");
	return 0;
}
