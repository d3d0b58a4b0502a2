// SPDX-License-Identifier: GPL-2.0 OR MIT
/*
 * Counts in a region during its migration from this node to node argv[1] (default 1) and back.
 * cc moves.c $(pkg-config --cflags --libs libkite)
 */
#include <kite/lite.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define COUNT 1000L

static LT_lh lh;
static _Atomic int has_ended;

static void *count(void *times)
{
	long err = 0;

	for (long i = 0; !err && i < (long)times; i++)
		err = LT_fetch_add(lh, 0, 1, NULL);
	has_ended = 1;
	return (void *)err;
}

/* Migrates the region to the other node and back, at least once, until the counter has ended. */
static int migrate(uint32_t node, int *moves)
{
	uint32_t targets[] = { node, 0 };
	int err = 0;

	for (*moves = 0; !err && (*moves < 2 || !has_ended); ++*moves)
		err = LT_move(lh, &targets[*moves % 2], 1, 0);
	return err;
}

int main(int argc, char **argv)
{
	uint32_t node = argc > 1 ? strtoul(argv[1], NULL, 10) : 1;
	int own = LT_join(NULL), moves = 0, err;
	uint64_t counted = 0;
	pthread_t counter;
	void *result;

	lh = own < 0 ? own : LT_malloc(NULL, 0, 4096, NULL, 0);
	err = lh < 0 ? (int)lh : -pthread_create(&counter, NULL, count, (void *)COUNT);
	if (!err) {
		err = migrate(node, &moves);
		pthread_join(counter, &result);
		err = err ?: (int)(long)result;
	}
	if (!err)
		err = LT_read(lh, 0, &counted, sizeof(counted));
	if (err) {
		fprintf(stderr, "moves: %s\n", strerror(-err));
		return 1;
	}
	printf("counted to %llu\n", (unsigned long long)counted);
	fprintf(stderr, "migrations: %d\n", moves);
	return LT_free(lh) < 0;
}
