// SPDX-License-Identifier: GPL-2.0 OR MIT
/*
 * Calls the servers of the named regions concurrently, and prints their replies.
 * cc multicast.c $(pkg-config --cflags --libs libkite)
 */
#include <kite/lite.h>
#include <stdio.h>
#include <string.h>

#define REGIONS_MAX 16
#define REPLY_MAX 64

/* Bytes of the reply: `kite bench serve` takes the function number as the length. */
#define FUNCTION 5

int main(int argc, char **argv)
{
	struct LT_reply replies[REGIONS_MAX];
	char buffers[REGIONS_MAX][REPLY_MAX];
	LT_lh lhs[REGIONS_MAX];
	int count = argc - 1 < REGIONS_MAX ? argc - 1 : REGIONS_MAX;
	int err = LT_join(NULL);

	for (int i = 0; err >= 0 && i < count; i++) {
		lhs[i] = LT_map(argv[i + 1], LT_WRITE);
		err = lhs[i] < 0 ? (int)lhs[i] : 0;
		replies[i].data = buffers[i];
		replies[i].room = REPLY_MAX;
	}
	if (err >= 0)
		err = LT_multicast_RPC(lhs, count, FUNCTION, "hello", 5, replies);
	if (err < 0) {
		fprintf(stderr, "multicast: %s\n", strerror(-err));
		return 1;
	}
	for (int i = 0; i < count; i++) {
		int64_t len = replies[i].result;

		if (len < 0)
			printf("%s: %s\n", argv[i + 1], strerror((int)-len));
		else
			printf("%s: %.*s\n", argv[i + 1], (int)len, buffers[i]);
	}
	return 0;
}
