// SPDX-License-Identifier: GPL-2.0 OR MIT
/*
 * Creates a line on node argv[1] (default 1) and copies it to this node by LT_memcpy.
 * cc copies.c $(pkg-config --cflags --libs libkite)
 */
#include <kite/lite.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define WIDTH 20

int main(int argc, char **argv)
{
	uint32_t node = argc > 1 ? strtoul(argv[1], NULL, 10) : 1;
	char line[WIDTH + 1] = "";
	int own = LT_join(NULL);
	LT_lh there = own < 0 ? own : LT_malloc(&node, 1, WIDTH, NULL, 0);
	LT_lh here = there < 0 ? there : LT_malloc(NULL, 0, WIDTH, NULL, 0);
	int err = here < 0 ? (int)here : LT_memset(there, 0, '-', WIDTH);

	if (!err)
		err = LT_memset(there, 0, '>', 1);
	/* Doubles the finished part. */
	for (int done = 2; !err && done < WIDTH; done *= 2)
		err = LT_memmove(there, done, there, 0, done <= WIDTH / 2 ? done : WIDTH - done);
	if (!err)
		err = LT_memcpy(here, 0, there, 0, WIDTH);
	if (!err)
		err = LT_read(here, 0, line, WIDTH);
	if (err) {
		fprintf(stderr, "copies: %s\n", strerror(-err));
		return 1;
	}
	printf("%s\n", line);
	return LT_free(here) < 0 || LT_free(there) < 0;
}
