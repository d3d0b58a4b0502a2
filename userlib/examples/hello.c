// SPDX-License-Identifier: GPL-2.0 OR MIT
/*
 * Writes to memory of node argv[1] (default 1), and reads it back.
 * cc hello.c $(pkg-config --cflags --libs libkite)
 */
#include <kite/lite.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int main(int argc, char **argv)
{
	char text[] = "hello", back[sizeof(text)];
	uint32_t node = argc > 1 ? strtoul(argv[1], NULL, 10) : 1;
	int own = LT_join(NULL);
	LT_lh lh = own < 0 ? own : LT_malloc(&node, 1, 4096, NULL, 0);
	int err = lh < 0 ? (int)lh : LT_write(lh, 0, text, sizeof(text));

	if (!err)
		err = LT_read(lh, 0, back, sizeof(back));
	if (err) {
		fprintf(stderr, "hello: %s\n", strerror(-err));
		return 1;
	}
	printf("node %d wrote to node %u and read back: %s\n", own, node, back);
	return LT_free(lh) < 0;
}
