// SPDX-License-Identifier: GPL-2.0 OR MIT
/*
 * Writes squares to node argv[1] (default 1), adds 1 to each and prints the previous values. All
 * requests of a step are in flight at once.
 * cc queue.c $(pkg-config --cflags --libs libkite)
 */
#include <kite/lite.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define COUNT 8

int main(int argc, char **argv)
{
	uint32_t node = argc > 1 ? strtoul(argv[1], NULL, 10) : 1;
	uint64_t squares[COUNT];
	struct LT_completion done;
	void *memory = NULL;
	int own = LT_join(NULL);
	LT_lh lh = own < 0 ? own : LT_malloc(&node, 1, 8 * COUNT, NULL, 0);
	int64_t queue = lh < 0 ? lh : LT_queue(COUNT, 8 * COUNT, &memory);
	int err = queue < 0 ? (int)queue : 0;

	for (uint64_t n = 0; !err && n < COUNT; n++) {
		uint64_t *square = (uint64_t *)memory + n;

		*square = n * n;
		err = LT_async_write(queue, n, lh, 8 * n, square, 8);
	}
	for (int n = 0; !err && n < COUNT; n++) {
		err = LT_wait(queue, &done);
		if (!err)
			err = done.status;
	}
	for (uint64_t n = 0; !err && n < COUNT; n++)
		err = LT_async_fetch_add(queue, n, lh, 8 * n, 1);
	for (int n = 0; !err && n < COUNT; n++) {
		err = LT_wait(queue, &done);
		if (!err)
			err = done.status;
		if (!err)
			squares[done.tag] = done.value;
	}
	if (err) {
		fprintf(stderr, "queue: %s\n", strerror(-err));
		return 1;
	}
	for (int n = 0; n < COUNT; n++)
		printf("%s%llu", n ? ", " : "[", (unsigned long long)squares[n]);
	printf("]\n");
	return LT_unqueue(queue) < 0 || LT_free(lh) < 0;
}
