// SPDX-License-Identifier: GPL-2.0 OR MIT
/*
 * argv[1] programs (default 1), on any nodes, wait at a barrier. Each then takes the lock and
 * appends a line to a shared region. The last one prints the region.
 * cc locks.c $(pkg-config --cflags --libs libkite)
 */
#include <errno.h>
#include <kite/lite.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define NAME "minutes"
#define BARRIER 0
#define LOCK 0

static char minutes[4096];

/* Allocates the region, or opens it if another program has allocated it. */
static LT_lh open_region(void)
{
	LT_lh lh = LT_malloc(NULL, 0, sizeof(minutes), NAME, LT_READ | LT_WRITE);

	return lh == -EEXIST ? LT_map(NAME, LT_READ | LT_WRITE | LT_MASTER) : lh;
}

static int add_line(LT_lh lh, int node)
{
	uint64_t lock;
	size_t len;
	int died = LT_lock(lh, LOCK, 0, 0, &lock);
	int err = died < 0 ? died : LT_read(lh, 0, minutes, sizeof(minutes));

	if (died == 1)
		fputs("locks: an owner of the lock died, the region may be inconsistent\n", stderr);
	if (!err) {
		len = strnlen(minutes, sizeof(minutes) - 1);
		snprintf(minutes + len, sizeof(minutes) - len, "node %d was here\n", node);
		err = LT_write(lh, 0, minutes, sizeof(minutes));
	}
	if (died >= 0)
		LT_unlock(lock);
	return err;
}

int main(int argc, char **argv)
{
	uint32_t all = argc > 1 ? strtoul(argv[1], NULL, 10) : 1;
	int own = LT_join(NULL);
	LT_lh lh = own < 0 ? own : open_region();
	int64_t err = lh < 0 ? lh : LT_barrier(lh, BARRIER, all, 60000);

	if (err >= 0)
		err = add_line(lh, own);
	/* The last program frees the region after all others have finished. */
	if (err >= 0)
		err = LT_barrier(lh, BARRIER, all, 60000);
	if (err >= 0 && LT_lock(lh, LOCK, LT_TRY, 0, &(uint64_t){0}) >= 0) {
		err = LT_read(lh, 0, minutes, sizeof(minutes));
		fputs(minutes, stdout);
		LT_free(lh);
	}
	if (err < 0)
		fprintf(stderr, "locks: %s\n", strerror((int)-err));
	return err < 0;
}
