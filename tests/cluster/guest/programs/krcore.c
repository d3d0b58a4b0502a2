// SPDX-License-Identifier: GPL-2.0 OR MIT
/*
 * Test of all functions of krcore.h between two processes.
 *
 *   krcore: the server, which registers memory for the client
 *   krcore NODE: the client, which runs all operations on the server at NODE in one kr_push, and
 *   waits for the completions by poll(2)
 *
 * Prints "passed" at the end.
 */
#include <errno.h>
#include <kite/krcore.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define PORT 2002
#define TIMEOUT_MS 60000

/* Prints the line of a failed check, and exits. */
#define CHECK(condition)							\
	do {									\
		if (!(condition)) {						\
			fprintf(stderr, "line %d: " #condition "\n", __LINE__);	\
			exit(1);						\
		}								\
	} while (0)

/* Memory of the server. */
static struct {
	uint64_t swapped;
	uint64_t counted;
	char bytes[4096];
} server;

/* Message: address and key of memory of the server. */
static struct remote_memory {
	uint64_t addr;
	uint32_t key;
} message;

/* Memory of the client. */
static struct {
	uint64_t old[3];
	char written[sizeof(server.bytes)];
	char read[sizeof(server.bytes)];
} client;

static uint32_t message_key;

static uint32_t reg(void *addr, uint64_t size, uint32_t rights)
{
	uint32_t key = 0;

	CHECK(kr_reg_mr(addr, size, rights, &key) == 0);
	return key;
}

/* Posts a receive of a message. */
static void post_receive(int qd, uint64_t tag)
{
	struct kr_receive receive = { tag, &message, sizeof(message), message_key };

	CHECK(kr_push_recv(qd, &receive, 1) == 0);
}

/* Waits for a message. */
static struct kr_message pop_message(int qd)
{
	struct kr_message received;

	CHECK(kr_pop_msgs(qd, &received, 1, TIMEOUT_MS) == 1);
	return received;
}

/* Sends the message, and waits for the completion. */
static void send_message(int qd)
{
	struct kr_request request = { .addr = &message,
					 .len = sizeof(message),
					 .key = message_key,
					 .op = KR_SEND,
					 .flags = KR_SIGNALED };
	struct kr_completion done;

	CHECK(kr_push(qd, &request, 1) == 0);
	CHECK(kr_pop(qd, &done, 1, TIMEOUT_MS) == 1 && done.status == 0);
}

/* Fills memory of the size of server.bytes with a pattern. */
static void fill(char *bytes)
{
	for (size_t i = 0; i < sizeof(server.bytes); i++)
		bytes[i] = (char)(i * 7 + i / 256);
}

static void run_server(void)
{
	uint32_t key = reg(&server, sizeof(server), KR_MR_READ | KR_MR_WRITE);
	struct kr_message received;
	int bound = kr_queue(), qd;

	CHECK(bound > 0 && kr_bind(bound, PORT) == 0);
	printf("bound\n");
	fflush(stdout);
	qd = kr_accept(bound, TIMEOUT_MS);
	CHECK(qd > 0);
	CHECK(kr_pop_msgs(qd, &received, 1, 0) == -EINVAL);
	post_receive(qd, 1);
	pop_message(qd);
	message = (struct remote_memory){ (uintptr_t)&server, key };
	send_message(qd);
	post_receive(qd, 2);
	post_receive(qd, 3);
	received = pop_message(qd);
	CHECK(received.tag == 2 && received.immediate == 77);
	CHECK(received.len == sizeof(server.bytes));
	CHECK(received.flags == (KR_IMMEDIATE | KR_WRITTEN));
	received = pop_message(qd);
	CHECK(received.tag == 3 && received.immediate == 78 && received.flags == KR_IMMEDIATE);
	fill(client.written);
	CHECK(memcmp(client.written, server.bytes, sizeof(server.bytes)) == 0);
	CHECK(server.swapped == 9 && server.counted == 5);
	post_receive(qd, 4);
	pop_message(qd);
	CHECK(kr_dereg_mr(key) == 0 && kr_dereg_mr(key) == -EBADF);
	send_message(qd);
	post_receive(qd, 5);
	CHECK(kr_pop_msgs(qd, &received, 1, TIMEOUT_MS) == -ECONNRESET);
	CHECK(kr_close(qd) == 0 && kr_close(bound) == 0);
}

/* Pops @count completions, and waits for them by poll(2). */
static void pop_all(int qd, struct kr_completion *done, int count)
{
	struct pollfd fd = { .fd = kr_fd(), .events = POLLIN };

	for (int popped = 0; popped < count;) {
		int ret = kr_pop(qd, done + popped, count - popped, 0);

		if (ret == -EAGAIN)
			CHECK(poll(&fd, 1, TIMEOUT_MS) == 1);
		else
			CHECK(ret > 0);
		popped += ret > 0 ? ret : 0;
	}
}

/* Runs each operation once. */
static void run_operations(int qd, uint32_t key)
{
	uint64_t swapped = message.addr, counted = swapped + 8, bytes = counted + 8;
	uint32_t remote_key = message.key, size = sizeof(client.read);
	struct kr_request requests[] = {
		{ .tag = 10, .addr = client.written, .remote_addr = bytes, .operand = 77,
		  .len = size, .op = KR_WRITE, .flags = KR_IMMEDIATE },
		{ .tag = 11, .addr = client.read, .remote_addr = bytes, .len = size,
		  .op = KR_READ, .flags = KR_SIGNALED },
		{ .tag = 12, .addr = &client.old[0], .remote_addr = swapped, .operand = 9, .len = 8,
		  .op = KR_COMPARE_SWAP, .flags = KR_SIGNALED },
		{ .tag = 13, .addr = &client.old[1], .remote_addr = swapped, .operand = 1, .len = 8,
		  .op = KR_COMPARE_SWAP, .flags = KR_SIGNALED },
		{ .tag = 14, .addr = &client.old[2], .remote_addr = counted, .operand = 5, .len = 8,
		  .op = KR_FETCH_ADD, .flags = KR_SIGNALED | KR_FENCED },
		{ .tag = 15, .addr = client.written, .operand = 78, .len = 12, .op = KR_SEND,
		  .flags = KR_SIGNALED | KR_IMMEDIATE },
	};
	struct kr_completion done[5];

	for (int i = 0; i < 6; i++) {
		requests[i].key = key;
		requests[i].remote_key = requests[i].op == KR_SEND ? 0 : remote_key;
	}
	fill(client.written);
	CHECK(kr_push(qd, requests, 6) == 0);
	pop_all(qd, done, 5);
	for (int i = 0; i < 5; i++)
		CHECK(done[i].tag == 11u + i && done[i].status == 0);
	CHECK(kr_pop(qd, done, 1, 0) == -EAGAIN);
	CHECK(memcmp(client.written, client.read, size) == 0);
	CHECK(client.old[0] == 0 && client.old[1] == 9 && client.old[2] == 0);
}

/* Reads a byte of the memory of the server. Returns the error of the push or of the completion. */
static int read_byte(int qd, uint32_t key, uint64_t offset)
{
	struct kr_request request = { .addr = client.read,
					 .remote_addr = message.addr + offset,
					 .len = 1,
					 .key = key,
					 .remote_key = message.key,
					 .op = KR_READ,
					 .flags = KR_SIGNALED };
	struct kr_completion done;
	int err = kr_push(qd, &request, 1);

	if (err)
		return err;
	CHECK(kr_pop(qd, &done, 1, TIMEOUT_MS) == 1);
	return done.status;
}

static void run_client(uint32_t node)
{
	uint32_t key = reg(&client, sizeof(client), 0);
	struct remote_memory memory;
	struct kr_completion done;
	int qd = kr_queue(), err;

	CHECK(qd > 0 && kr_pop(qd, &done, 1, 0) == -ENOTCONN);
	CHECK(kr_connect(qd, node, PORT) == 0 && kr_connect(qd, node, PORT) == -EBUSY);
	send_message(qd);
	post_receive(qd, 1);
	pop_message(qd);
	run_operations(qd, key);
	CHECK(read_byte(qd, key, sizeof(server)) == -ERANGE);
	CHECK(read_byte(qd, key + 1, 0) == -EBADF);
	memory = message;
	send_message(qd);
	post_receive(qd, 2);
	pop_message(qd);
	message = memory;
	/* Reads succeed until the cached attributes of the key expire. */
	do
		err = read_byte(qd, key, 0);
	while (!err);
	CHECK(err == -ENOENT);
	CHECK(kr_close(qd) == 0 && kr_dereg_mr(key) == 0);
}

int main(int argc, char **argv)
{
	message_key = reg(&message, sizeof(message), 0);
	if (argc > 1)
		run_client(strtoul(argv[1], NULL, 10));
	else
		run_server();
	printf("passed\n");
	return 0;
}
