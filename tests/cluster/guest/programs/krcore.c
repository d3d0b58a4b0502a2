// SPDX-License-Identifier: GPL-2.0 OR MIT
/*
 * Tests all functions of krcore.h between two programs. The one without arguments lends memory. The
 * one with the number of that node runs all operations there, in one kr_push, and waits by poll(2).
 */
#include <errno.h>
#include <kite/krcore.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define PORT 2002
#define PATIENCE_MS 60000

/* Prints the place of the failure, and exits. */
#define CHECK(good)                                                        \
	do {                                                               \
		if (!(good)) {                                             \
			fprintf(stderr, "line %d: " #good "\n", __LINE__); \
			exit(1);                                           \
		}                                                          \
	} while (0)

/* The lent memory. */
static struct {
	uint64_t swapped;
	uint64_t counted;
	char bytes[4096];
} lent;

static struct place {
	uint64_t addr;
	uint32_t key;
} message;

/* The memory of the peer. */
static struct {
	uint64_t was[3];
	char written[sizeof(lent.bytes)];
	char read[sizeof(lent.bytes)];
} own;

static uint32_t message_key;

static uint32_t reg(void *addr, uint64_t size, uint32_t others)
{
	uint32_t key = 0;

	CHECK(kr_reg_mr(addr, size, others, &key) == 0);
	return key;
}

static void want(int qd, uint64_t tag)
{
	struct kr_receive place = { tag, &message, sizeof(message), message_key };

	CHECK(kr_push_recv(qd, &place, 1) == 0);
}

static struct kr_message hear(int qd)
{
	struct kr_message heard;

	CHECK(kr_pop_msgs(qd, &heard, 1, PATIENCE_MS) == 1);
	return heard;
}

static void say(int qd)
{
	struct kr_request request = { .addr = &message,
					 .len = sizeof(message),
					 .key = message_key,
					 .op = KR_SEND,
					 .flags = KR_SIGNALED };
	struct kr_completion done;

	CHECK(kr_push(qd, &request, 1) == 0);
	CHECK(kr_pop(qd, &done, 1, PATIENCE_MS) == 1 && done.status == 0);
}

static void fill(char *bytes)
{
	for (size_t i = 0; i < sizeof(lent.bytes); i++)
		bytes[i] = (char)(i * 7 + i / 256);
}

static void lend(void)
{
	uint32_t key = reg(&lent, sizeof(lent), KR_MR_READ | KR_MR_WRITE);
	struct kr_message heard;
	int bound = kr_queue(), qd;

	CHECK(bound > 0 && kr_bind(bound, PORT) == 0);
	printf("bound\n");
	fflush(stdout);
	qd = kr_accept(bound, PATIENCE_MS);
	CHECK(qd > 0);
	CHECK(kr_pop_msgs(qd, &heard, 1, 0) == -EINVAL);
	want(qd, 1);
	hear(qd);
	message = (struct place){ (uintptr_t)&lent, key };
	say(qd);
	want(qd, 2);
	want(qd, 3);
	heard = hear(qd);
	CHECK(heard.tag == 2 && heard.immediate == 77 && heard.len == sizeof(lent.bytes));
	CHECK(heard.flags == (KR_IMMEDIATE | KR_WRITTEN));
	heard = hear(qd);
	CHECK(heard.tag == 3 && heard.immediate == 78 && heard.flags == KR_IMMEDIATE);
	fill(own.written);
	CHECK(memcmp(own.written, lent.bytes, sizeof(lent.bytes)) == 0);
	CHECK(lent.swapped == 9 && lent.counted == 5);
	want(qd, 4);
	hear(qd);
	CHECK(kr_dereg_mr(key) == 0 && kr_dereg_mr(key) == -EBADF);
	say(qd);
	want(qd, 5);
	CHECK(kr_pop_msgs(qd, &heard, 1, PATIENCE_MS) == -ECONNRESET);
	CHECK(kr_close(qd) == 0 && kr_close(bound) == 0);
}

/* Pops @count completions, and waits for them by poll(2). */
static void take(int qd, struct kr_completion *done, int count)
{
	struct pollfd fd = { .fd = kr_fd(), .events = POLLIN };

	for (int found = 0; found < count;) {
		int more = kr_pop(qd, done + found, count - found, 0);

		if (more == -EAGAIN)
			CHECK(poll(&fd, 1, PATIENCE_MS) == 1);
		else
			CHECK(more > 0);
		found += more > 0 ? more : 0;
	}
}

static void do_all(int qd, uint32_t key)
{
	uint64_t swapped = message.addr, counted = swapped + 8, bytes = counted + 8;
	uint32_t there = message.key, size = sizeof(own.read);
	struct kr_request all[] = {
		{ .tag = 10, .addr = own.written, .remote_addr = bytes, .operand = 77,
		  .len = size, .op = KR_WRITE, .flags = KR_IMMEDIATE },
		{ .tag = 11, .addr = own.read, .remote_addr = bytes, .len = size,
		  .op = KR_READ, .flags = KR_SIGNALED },
		{ .tag = 12, .addr = &own.was[0], .remote_addr = swapped, .operand = 9, .len = 8,
		  .op = KR_COMPARE_SWAP, .flags = KR_SIGNALED },
		{ .tag = 13, .addr = &own.was[1], .remote_addr = swapped, .operand = 1, .len = 8,
		  .op = KR_COMPARE_SWAP, .flags = KR_SIGNALED },
		{ .tag = 14, .addr = &own.was[2], .remote_addr = counted, .operand = 5, .len = 8,
		  .op = KR_FETCH_ADD, .flags = KR_SIGNALED | KR_FENCED },
		{ .tag = 15, .addr = own.written, .operand = 78, .len = 12, .op = KR_SEND,
		  .flags = KR_SIGNALED | KR_IMMEDIATE },
	};
	struct kr_completion done[5];

	for (int i = 0; i < 6; i++) {
		all[i].key = key;
		all[i].remote_key = all[i].op == KR_SEND ? 0 : there;
	}
	fill(own.written);
	CHECK(kr_push(qd, all, 6) == 0);
	take(qd, done, 5);
	for (int i = 0; i < 5; i++)
		CHECK(done[i].tag == 11u + i && done[i].status == 0);
	CHECK(kr_pop(qd, done, 1, 0) == -EAGAIN);
	CHECK(memcmp(own.written, own.read, size) == 0);
	CHECK(own.was[0] == 0 && own.was[1] == 9 && own.was[2] == 0);
}

/* Reads a byte of the lent memory. Returns the error of its completion. */
static int read_byte(int qd, uint32_t key, uint64_t offset)
{
	struct kr_request request = { .addr = own.read,
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
	CHECK(kr_pop(qd, &done, 1, PATIENCE_MS) == 1);
	return done.status;
}

static void use(uint32_t node)
{
	uint32_t key = reg(&own, sizeof(own), 0);
	struct place place;
	struct kr_completion done;
	int qd = kr_queue(), err;

	CHECK(qd > 0 && kr_pop(qd, &done, 1, 0) == -ENOTCONN);
	CHECK(kr_connect(qd, node, PORT) == 0 && kr_connect(qd, node, PORT) == -EBUSY);
	say(qd);
	want(qd, 1);
	hear(qd);
	do_all(qd, key);
	CHECK(read_byte(qd, key, sizeof(lent)) == -ERANGE);
	CHECK(read_byte(qd, key + 1, 0) == -EBADF);
	place = message;
	say(qd);
	want(qd, 2);
	hear(qd);
	message = place;
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
		use(strtoul(argv[1], NULL, 10));
	else
		lend();
	printf("all is well\n");
	return 0;
}
