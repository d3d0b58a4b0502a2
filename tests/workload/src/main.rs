// SPDX-License-Identifier: GPL-2.0 OR MIT
//! `kite-workload`: programs of kite's tests that run on the nodes of a cluster.
//!
//! Each subcommand is a module. The programs use the crate `kite`. Requests that the crate cannot express use the
//! device directly ([`support::abi`]).

mod churn;
mod errors;
mod examples;
mod fuzz;
mod nodes;
mod notices;
mod queues;
mod readme;
mod region;
mod requests;
mod rpc;
mod support;
mod sync;
mod torture;
mod views;
mod vqp;

use std::process::ExitCode;

use clap::Parser;

use region::{alloc_scaling, basic, copies, integrity, register, stream, transfer, unserved_fault};
use sync::{atomics, locks};

/// Programs of kite's tests that run on the nodes of a cluster.
#[derive(Debug, Parser)]
enum Workload {
    AllocScaling(alloc_scaling::AllocScaling),
    #[command(subcommand)]
    Atomics(atomics::Atomics),
    #[command(subcommand)]
    Attempt(basic::Attempt),
    Fill(basic::Fill),
    Digest(basic::DigestOf),
    Anonymous(basic::Anonymous),
    Await(basic::Await),
    #[command(subcommand)]
    Churn(churn::Churn),
    #[command(subcommand)]
    Copies(copies::Copies),
    /// Checks that invalid requests fail with the errno of the ABI
    Errors {
        /// Group of requests
        #[arg(value_enum)]
        case: errors::Case,
    },
    Examples(examples::Examples),
    Fuzz(fuzz::Fuzz),
    Integrity(integrity::Integrity),
    #[command(subcommand)]
    Locks(locks::Locks),
    OpenHandles(basic::OpenHandles),
    Nodes(nodes::Nodes),
    Notices(notices::Notices),
    #[command(subcommand)]
    Queues(queues::Queues),
    /// Runs the samples of README.md and docs/guide.md
    Readme,
    Register(register::Register),
    Requests(requests::Requests),
    Stream(stream::WriteStream),
    #[command(subcommand)]
    Rpc(rpc::Rpc),
    #[command(subcommand)]
    Vqp(vqp::Vqps),
    Torture(torture::Torture),
    Transfer(transfer::Transfer),
    UnservedFault(unserved_fault::UnservedFault),
    Views(views::Views),
    Watch(transfer::Watch),
}

fn main() -> ExitCode {
    let result = match Workload::parse() {
        Workload::AllocScaling(scaling) => scaling.run(),
        Workload::Atomics(atomics) => atomics.run(),
        Workload::Attempt(attempt) => {
            attempt.run();
            Ok(())
        }
        Workload::Fill(fill) => fill.run(),
        Workload::Digest(digest) => digest.run(),
        Workload::Anonymous(anonymous) => anonymous.run(),
        Workload::Await(wait) => wait.run(),
        Workload::Churn(churn) => churn.run(),
        Workload::Copies(copies) => copies.run(),
        Workload::Errors { case } => errors::run(case),
        Workload::Examples(examples) => examples.run(),
        Workload::Fuzz(fuzz) => fuzz.run(),
        Workload::Integrity(integrity) => integrity.run(),
        Workload::Locks(locks) => locks.run(),
        Workload::OpenHandles(handles) => handles.run(),
        Workload::Nodes(nodes) => nodes.run(),
        Workload::Notices(notices) => notices.run(),
        Workload::Queues(queues) => queues.run(),
        Workload::Readme => readme::run(),
        Workload::Register(register) => register.run(),
        Workload::Requests(requests) => requests.run(),
        Workload::Stream(stream) => stream.run(),
        Workload::Rpc(rpc) => rpc.run(),
        Workload::Vqp(vqp) => vqp.run(),
        Workload::Torture(torture) => torture.run(),
        Workload::Transfer(transfer) => transfer.run(),
        Workload::UnservedFault(fault) => fault.run(),
        Workload::Views(views) => views.run(),
        Workload::Watch(watch) => watch.run(),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("kite-workload: {error:#}");
            ExitCode::FAILURE
        }
    }
}
