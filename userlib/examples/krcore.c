// SPDX-License-Identifier: GPL-2.0 OR MIT
/*
 * A counter that other nodes reach by VQPs. Without arguments the program has the counter, and
 * sends its address to each peer. With the node of the counter as argument it gets the address,
 * adds to the counter, and prints the previous value. The addition uses an I/O queue, which saves
 * system calls under steady load.
 * cc krcore.c $(pkg-config --cflags --libs libkite)
 */
#include <errno.h>
#include <kite/krcore.h>
#include <kite/lite.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define PORT 2001
#define PATIENCE_MS 10000

/* Where the counter is. */
struct place {
	uint64_t addr;
	uint32_t key;
};

static struct {
	uint64_t counter;
	struct place message;
} memory;

static uint32_t key;

/* Pushes a request, and waits for its completion. */
static int do_one(int qd, struct kr_request request)
{
	struct kr_completion done;
	int err;

	request.key = key;
	request.flags |= KR_SIGNALED;
	err = kr_push(qd, &request, 1);
	if (!err)
		err = kr_pop(qd, &done, 1, PATIENCE_MS);
	return err < 0 ? err : done.status;
}

/* Submits a request to an I/O queue, and waits for its completion. */
static int do_one_async(int qd, struct kr_request request)
{
	struct LT_completion done = { .status = 0 };
	void *memory = NULL;
	int64_t io_queue = LT_queue(8, 1, &memory);
	int err;

	if (io_queue < 0)
		return (int)io_queue;
	request.key = key;
	err = kr_push_async(qd, io_queue, &request);
	if (!err)
		err = LT_wait(io_queue, &done);
	LT_unqueue(io_queue);
	return err ? err : done.status;
}

static int send_message(int qd)
{
	return do_one(qd, (struct kr_request){ .op = KR_SEND,
						  .addr = &memory.message,
						  .len = sizeof(memory.message) });
}

static int receive_message(int qd)
{
	struct kr_receive place = { .addr = &memory.message,
				       .len = sizeof(memory.message),
				       .key = key };
	struct kr_message message;
	int err = kr_push_recv(qd, &place, 1);

	if (!err)
		err = kr_pop_msgs(qd, &message, 1, PATIENCE_MS);
	return err < 0 ? err : 0;
}

static int count(uint32_t node)
{
	struct kr_request add = { .op = KR_FETCH_ADD,
				     .addr = &memory.counter,
				     .len = sizeof(memory.counter),
				     .operand = 1 };
	int qd = kr_queue();
	int err = qd < 0 ? qd : kr_connect(qd, node, PORT);

	if (!err)
		err = send_message(qd);
	if (!err)
		err = receive_message(qd);
	if (err)
		return err;
	add.remote_addr = memory.message.addr;
	add.remote_key = memory.message.key;
	err = do_one_async(qd, add);
	if (err)
		return err;
	printf("previous value: %llu\n", (unsigned long long)memory.counter);
	return kr_close(qd);
}

/* Sends the address of the counter to a peer, and waits until the peer closes. */
static int tell(int qd)
{
	int err = receive_message(qd);

	memory.message = (struct place){ (uintptr_t)&memory.counter, key };
	if (!err)
		err = send_message(qd);
	if (!err)
		err = receive_message(qd);
	return err == -ECONNRESET ? 0 : err;
}

/* Accepts a peer, waiting by poll(2) as a server with other descriptors does. */
static int next(int bound)
{
	struct pollfd fd = { .fd = kr_fd(), .events = POLLIN };
	int qd = fd.fd < 0 ? fd.fd : kr_accept(bound, 0);

	while (qd == -EAGAIN) {
		if (poll(&fd, 1, -1) < 0)
			return -errno;
		qd = kr_accept(bound, 0);
	}
	return qd;
}

static int serve(void)
{
	int bound = kr_queue();
	int err = bound < 0 ? bound : kr_bind(bound, PORT);

	printf("bound\n");
	fflush(stdout);
	while (!err) {
		int qd = next(bound);

		if (qd < 0)
			return qd;
		err = tell(qd);
		kr_close(qd);
	}
	return err;
}

int main(int argc, char **argv)
{
	int err = kr_reg_mr(&memory, sizeof(memory), KR_MR_READ | KR_MR_WRITE, &key);

	if (!err)
		err = argc > 1 ? count(strtoul(argv[1], NULL, 10)) : serve();
	if (err)
		fprintf(stderr, "krcore: %s\n", strerror(-err));
	return err != 0;
}
