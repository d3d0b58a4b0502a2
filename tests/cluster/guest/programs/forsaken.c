// SPDX-License-Identifier: GPL-2.0 OR MIT
/*
 * Serves the calls of the sample rpc.c, receives one, and unmaps its handle without a reply. Then
 * sleeps until it is killed.
 */
#include <kite/lite.h>
#include <stdio.h>
#include <unistd.h>

int main(void)
{
	static char text[0x100000];
	struct LT_call call;
	int joined = LT_join(NULL);
	LT_lh lh = joined < 0 ? joined : LT_malloc(NULL, 0, 1, "capitals", LT_WRITE);
	int64_t done = lh < 0 ? lh : LT_regRPC(lh, 0, sizeof(text));

	if (done == 0) {
		puts("serving");
		fflush(stdout);
		done = LT_recvRPC(lh, &call, text, sizeof(text));
	}
	if (done >= 0)
		done = LT_unmap(lh);
	printf("gave it back: %lld\n", (long long)done);
	fflush(stdout);
	pause();
	return 0;
}
