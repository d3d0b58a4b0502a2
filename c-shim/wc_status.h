/* SPDX-License-Identifier: GPL-2.0 */
#ifndef _KITE_WC_STATUS_H
#define _KITE_WC_STATUS_H

/* Numeric codes of `WcStatus` in src/verbs/cq.rs, also in the trace event kite_retry. */
enum kite_wc_status {
	KITE_WC_SUCCESS,
	KITE_WC_FLUSHED,
	KITE_WC_RETRY_EXCEEDED,
	KITE_WC_REMOTE_ERROR,
	KITE_WC_LOCAL_ERROR,
	KITE_WC_RNR_RETRY_EXCEEDED,
	KITE_WC_TIMED_OUT,
};

#endif /* _KITE_WC_STATUS_H */
