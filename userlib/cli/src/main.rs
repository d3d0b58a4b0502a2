// SPDX-License-Identifier: GPL-2.0 OR MIT
//! The command `kite`: inspects and configures a cluster, copies files to its memory and back, and measures it.

mod args;
mod bench;
mod complete;
mod copy;
mod health;
mod hint;
mod nodes;
mod output;
mod preload;
mod qos;
mod regions;
mod setup;
mod status;
mod users;

use std::path::Path;
use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::{CommandFactory, Parser};
use clap_complete::CompleteEnv;
use kite::{AllocOptions, Cluster, Rights};

use args::{Args, Command};

fn main() -> ExitCode {
    CompleteEnv::with_factory(Args::command).complete();
    let args = Args::parse();
    if matches!(args.command, Command::Status { check: true, .. }) {
        return health::run(&args.rnic);
    }
    match run(args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("kite: {error:#}");
            if let Some(hint) = hint::hint_for(&error) {
                eprintln!("      {hint}");
            }
            ExitCode::FAILURE
        }
    }
}

fn run(args: Args) -> Result<()> {
    let rnic = args.rnic;
    let open = || Cluster::open_rnic(&rnic);
    match args.command {
        Command::Init { listen, store } => setup::init(&rnic, &listen, &store),
        Command::Join {
            seed,
            store,
            key_file,
        } => setup::join(&rnic, seed.as_deref(), &store, key_file.as_deref()),
        Command::Leave { yes } => setup::leave(&rnic, yes),
        Command::Evict { node, yes } => setup::evict(&open()?, &node, yes),
        Command::Status { numeric, json, .. } => status::print_status(&rnic, numeric, json),
        Command::Nodes { json } => nodes::print_members(&open()?, json),
        Command::Stats { json } => status::print_stats(&open()?, json),
        Command::Vqps { numeric, json } => status::print_vqps(&open()?, numeric, json),
        Command::Regions {
            node,
            numeric,
            json,
        } => regions::print_list(&open()?, node.as_ref(), numeric, json),
        Command::Alloc { name, size, place } => {
            let cluster = open()?;
            let options = AllocOptions::new(size)
                .name(&name)
                .nodes(nodes::resolve_nodes(&cluster, &place.node)?)
                .other_rights(place.other_rights);
            let allocated = cluster.alloc(&options).map(drop);
            allocated.with_context(|| format!("allocating {name}"))
        }
        Command::Free { region } => {
            let free =
                || -> Result<()> { Ok(regions::open(&open()?, &region, Rights::MASTER)?.free()?) };
            free().with_context(|| format!("freeing {}", region.name))
        }
        Command::Rename { region, new_name } => {
            let rename = || -> Result<()> {
                Ok(regions::open(&open()?, &region, Rights::MASTER)?.rename(&new_name)?)
            };
            rename().with_context(|| format!("renaming {} to {new_name}", region.name))
        }
        Command::Grant { name, user, rights } => {
            let region = open()?.map(&name, Rights::MASTER);
            let granted = region.and_then(|region| match user {
                Some(uid) => region.grant(uid, rights),
                None => region.grant_others(rights),
            });
            granted.with_context(|| format!("granting rights to {name}"))
        }
        Command::Migrate {
            name,
            node,
            timeout,
        } => {
            let cluster = open()?;
            let node = nodes::resolve_nodes(&cluster, &node)?;
            let region = cluster.map(&name, Rights::MASTER);
            let moved = region.and_then(|region| region.with_timeout(timeout).migrate_to(&node));
            moved.with_context(|| format!("migrating {name}"))
        }
        Command::Qos { policy, json } => qos::show_or_set_policy(&open()?, policy, json),
        Command::Limit(limit) => qos::show_or_set_limit(&open()?, &limit),
        Command::Put { file, name, place } => {
            let cluster = open()?;
            let nodes = nodes::resolve_nodes(&cluster, &place.node)?;
            let options = |len| {
                AllocOptions::new(len)
                    .nodes(nodes)
                    .other_rights(place.other_rights)
            };
            copy::put(&cluster, &file, &name, options)
        }
        Command::Get { region, file } => copy::get(&open()?, &region, &file),
        Command::Bench(bench) => bench::run(&open()?, &bench),
        Command::Run { verbose, program } => preload::run(&program, verbose),
        Command::Completion { shell } => complete::print_script(shell),
        Command::Man { dir } => write_man_pages(&dir),
    }
}

fn write_man_pages(dir: &Path) -> Result<()> {
    std::fs::create_dir_all(dir)
        .and_then(|()| clap_mangen::generate_to(Args::command(), dir))
        .with_context(|| format!("writing manual pages to {}", dir.display()))
}
