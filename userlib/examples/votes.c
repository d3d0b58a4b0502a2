// SPDX-License-Identifier: GPL-2.0 OR MIT
/*
 * Without arguments: waits for three votes in memory of this program, and prints their counts.
 * With a choice (0 to 2): votes for it in the memory of the program without arguments, on any node.
 * cc votes.c $(pkg-config --cflags --libs libkite)
 */
#include <kite/lite.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define NAME "votes"
#define CHOICES 3

/* Changed by other programs. A registered region begins at a page. */
static _Alignas(4096) _Atomic uint64_t votes[CHOICES];

static int count(void)
{
	LT_lh lh = LT_register(votes, sizeof(votes), NAME, LT_READ | LT_WRITE);

	if (lh < 0)
		return (int)lh;
	puts("counting");
	fflush(stdout);
	/* The votes are in memory of this program, so no request is needed. */
	while (atomic_load(&votes[0]) + atomic_load(&votes[1]) + atomic_load(&votes[2]) < 3)
		usleep(10000);
	printf("[%llu, %llu, %llu]\n", (unsigned long long)atomic_load(&votes[0]),
	       (unsigned long long)atomic_load(&votes[1]),
	       (unsigned long long)atomic_load(&votes[2]));
	return LT_free(lh);
}

static int vote(uint64_t choice)
{
	LT_lh lh = LT_map(NAME, LT_READ | LT_WRITE);

	return lh < 0 ? (int)lh : LT_fetch_add(lh, 8 * choice, 1, NULL);
}

int main(int argc, char **argv)
{
	int err = LT_join(NULL);

	if (err >= 0)
		err = argc > 1 ? vote(strtoul(argv[1], NULL, 10)) : count();
	if (err < 0)
		fprintf(stderr, "votes: %s\n", strerror(-err));
	return err < 0;
}
