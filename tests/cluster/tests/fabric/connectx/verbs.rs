// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Programs of rdma-core and perftest.

use kite_cluster::Result;

use crate::{perftest_on, run_pair, sleep_for_events, PAIR};

/// Runs a pingpong program of rdma-core whose two sides accept the same options.
fn pingpong(name: &str) -> Result<()> {
    let pair = PAIR.take()?;
    let program = format!("ibv_{name}_pingpong -n 200");
    let output = run_pair(&pair, &format!("{program} -c"), &program, 18515)?;
    assert!(output.contains("200 iters in"), "{output}");
    Ok(())
}

/// Runs a program of perftest.
fn perftest(line: &str) -> Result<()> {
    perftest_on(&*PAIR.take()?, line)
}

#[test]
fn rc_pingpong_transfers_its_data() -> Result<()> {
    pingpong("rc")
}

#[test]
#[ignore = "long"]
fn uc_pingpong_transfers_its_data() -> Result<()> {
    pingpong("uc")
}

#[test]
#[ignore = "long"]
fn ud_pingpong_transfers_its_data() -> Result<()> {
    pingpong("ud")
}

#[test]
#[ignore = "long"]
fn srq_pingpong_transfers_its_data() -> Result<()> {
    pingpong("srq")
}

#[test]
fn completion_event_wakes_a_sleeping_process() -> Result<()> {
    sleep_for_events(&*PAIR.take()?)
}

#[test]
fn xrc_pingpong_transfers_its_data() -> Result<()> {
    let pair = PAIR.take()?;
    let program = "ibv_xsrq_pingpong -n 200";
    let output = run_pair(&pair, &format!("{program} -c 1"), program, 18515)?;
    assert!(output.contains("success"), "{output}");
    Ok(())
}

/// Defines a test for each program and transport of perftest.
macro_rules! perftests {
    ($($(#[$attribute:meta])? $name:ident: $line:literal,)+) => {
        $(
            #[test]
            $(#[$attribute])?
            fn $name() -> Result<()> {
                perftest($line)
            }
        )+
    };
}

perftests! {
    #[ignore = "long"]
    write_lat_over_rc_completes: "ib_write_lat",
    #[ignore = "long"]
    write_bw_over_rc_completes: "ib_write_bw",
    #[ignore = "long"]
    read_lat_over_rc_completes: "ib_read_lat",
    #[ignore = "long"]
    read_bw_over_rc_completes: "ib_read_bw",
    #[ignore = "long"]
    send_lat_over_rc_completes: "ib_send_lat",
    #[ignore = "long"]
    send_bw_over_rc_completes: "ib_send_bw",
    #[ignore = "long"]
    atomic_lat_over_rc_completes: "ib_atomic_lat",
    atomic_bw_over_rc_completes: "ib_atomic_bw -A CMP_AND_SWAP",
    #[ignore = "long"]
    write_lat_over_uc_completes: "ib_write_lat -c UC",
    #[ignore = "long"]
    write_bw_over_uc_completes: "ib_write_bw -c UC",
    #[ignore = "long"]
    send_lat_over_uc_completes: "ib_send_lat -c UC",
    #[ignore = "long"]
    send_bw_over_uc_completes: "ib_send_bw -c UC",
    #[ignore = "long"]
    send_lat_over_ud_completes: "ib_send_lat -c UD",
    #[ignore = "long"]
    send_bw_over_ud_completes: "ib_send_bw -c UD",
    #[ignore = "long"]
    write_lat_over_dc_completes: "ib_write_lat -c DC",
    #[ignore = "long"]
    write_bw_over_dc_completes: "ib_write_bw -c DC",
    #[ignore = "long"]
    read_lat_over_dc_completes: "ib_read_lat -c DC",
    read_bw_over_dc_completes: "ib_read_bw -c DC",
    #[ignore = "long"]
    send_lat_over_dc_completes: "ib_send_lat -c DC",
    #[ignore = "long"]
    send_bw_over_dc_completes: "ib_send_bw -c DC",
    #[ignore = "long"]
    atomic_lat_over_dc_completes: "ib_atomic_lat -c DC",
    #[ignore = "long"]
    atomic_bw_over_dc_completes: "ib_atomic_bw -c DC",
    #[ignore = "long"]
    write_bw_over_xrc_completes: "ib_write_bw -c XRC",
    #[ignore = "long"]
    send_bw_over_xrc_completes: "ib_send_bw -c XRC",
    write_bw_over_16_qps_completes: "ib_write_bw -q 16",
    #[ignore = "long"]
    bidirectional_write_bw_completes: "ib_write_bw -b",
}
