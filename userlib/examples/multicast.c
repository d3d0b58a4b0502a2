// SPDX-License-Identifier: GPL-2.0 OR MIT
/*
 * Asks the servers of all regions that are named, at once, and prints what each of them answers.
 * cc multicast.c $(pkg-config --cflags --libs libkite)
 */
#include <kite/lite.h>
#include <stdio.h>
#include <string.h>

#define MOST 16
#define ROOM 64

/* What `kite bench serve` takes for the length of its answer. */
#define FUNCTION 5

int main(int argc, char **argv)
{
	struct LT_reply replies[MOST];
	char rooms[MOST][ROOM];
	LT_lh lhs[MOST];
	int count = argc - 1 < MOST ? argc - 1 : MOST;
	int err = LT_join(NULL);

	for (int i = 0; err >= 0 && i < count; i++) {
		lhs[i] = LT_map(argv[i + 1], LT_WRITE);
		err = lhs[i] < 0 ? (int)lhs[i] : 0;
		replies[i].data = rooms[i];
		replies[i].room = ROOM;
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
			printf("%s: %.*s\n", argv[i + 1], (int)len, rooms[i]);
	}
	return 0;
}
