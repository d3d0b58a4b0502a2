// SPDX-License-Identifier: GPL-2.0 OR MIT
/*
 * Example of calls and messages. Without arguments: serves calls, and replies with their text in
 * capitals, until it receives a message.
 * With a text: calls the server with the text, prints the reply, and sends a message.
 * With a text and a number: calls with the text repeated this number of times, and prints the
 * length of the reply in bytes.
 * cc rpc.c $(pkg-config --cflags --libs libkite)
 */
#include <ctype.h>
#include <kite/lite.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define SERVICE "capitals"

/* Bytes of a call. Data that are not sent inline use a buffer that exists during the call. */
#define TEXT_MAX 0x100000

static int64_t serve(void)
{
	static char text[TEXT_MAX];
	LT_lh lh = LT_malloc(NULL, 0, 1, SERVICE, LT_WRITE);
	int64_t len = lh < 0 ? lh : LT_regRPC(lh, 0, TEXT_MAX);
	struct LT_call call = {0};

	if (len == 0) {
		puts("serving");
		fflush(stdout);
	}
	while (len >= 0) {
		/* Replies to the last call, if any, and receives the next one. */
		len = LT_reply_recvRPC(lh, &call, text, len, text, sizeof(text));
		for (int64_t i = 0; i < len; i++)
			text[i] = toupper((unsigned char)text[i]);
		if (len >= 0 && call.id == 0) {
			printf("node %u: %.*s\n", call.node, (int)len, text);
			break;
		}
	}
	return len < 0 ? len : LT_free(lh);
}

static int64_t call(const char *text, size_t copies)
{
	static char data[TEXT_MAX], reply[TEXT_MAX];
	size_t size = strlen(text), all = 0;
	LT_lh lh = LT_map(SERVICE, LT_WRITE);
	int64_t len;

	for (size_t i = 0; i < copies && all + size <= sizeof(data); i++, all += size)
		memcpy(data + all, text, size);
	len = lh < 0 ? lh : LT_RPC(lh, 0, data, all, reply, all);
	if (len < 0)
		return len;
	if (copies == 1)
		printf("%.*s\n", (int)len, reply);
	else
		printf("%lld bytes\n", (long long)len);
	return LT_send(lh, 0, "bye", 3);
}

int main(int argc, char **argv)
{
	int64_t err = LT_join(NULL);

	if (err >= 0)
		err = argc > 1 ? call(argv[1], argc > 2 ? atoi(argv[2]) : 1) : serve();
	if (err < 0)
		fprintf(stderr, "rpc: %s\n", strerror((int)-err));
	return err < 0;
}
