//! An all-reduce over TCP between processes of this host, beside one in which every rank sends all
//! of its values to every other one.
//!
//! ```sh
//! cargo run --release -p foveate-shard --example reduce -- 4 4000000
//! ```
//!
//! starts 4 ranks and prints the median time of 9 all-reduces of 4,000,000 values each way, and the
//! ratio. Both give the same bits, which is checked.

use std::net::TcpListener;
use std::process::Command;
use std::time::{Duration, Instant};

use foveate_shard::ShardError;
use foveate_shard::collectives::{Collectives, Kind, Meeting, connect};

const ROUNDS: usize = 9;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let numbers = args.iter().map(|arg| arg.parse::<usize>()).collect::<Result<Vec<_>, _>>()?;
    match numbers[..] {
        [ranks, values] => {
            let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
            let start = |rank: usize| {
                let all = [ranks, values, rank, usize::from(port)].map(|n| n.to_string());
                Command::new(std::env::current_exe()?).args(all).spawn()
            };
            let started = (0..ranks).map(start).collect::<Result<Vec<_>, _>>()?;
            for mut rank in started {
                if !rank.wait()?.success() {
                    return Err("a rank failed".into());
                }
            }
            Ok(())
        }
        [ranks, values, rank, port] => Ok(measure(ranks, values, rank, port as u16)?),
        _ => Err("give the number of ranks and of values".into()),
    }
}

/// Every rank sends all to all, and sums all.
fn whole(world: &dyn Collectives, values: &mut [f32]) -> Result<(), ShardError> {
    let own = bytemuck::cast_slice::<f32, u8>(values).to_vec();
    let parts = world.exchange_as(Kind::AllReduce, vec![own; world.ranks()])?;
    values.fill(0.0);
    for part in &parts {
        let (part, _) = part.as_chunks();
        values.iter_mut().zip(part).for_each(|(sum, &value)| *sum += f32::from_ne_bytes(value));
    }
    Ok(())
}

fn measure(ranks: usize, values: usize, rank: usize, port: u16) -> Result<(), ShardError> {
    let minute = Duration::from_secs(60);
    let world = connect(&Meeting {
        host: "127.0.0.1".to_owned(),
        port,
        rank,
        ranks,
        run: 1,
        attempt: 0,
        arrival: minute,
        deadline: minute,
        silence: minute,
    })?;
    let first: Vec<f32> = (0..values).map(|i| ((i * 7 + rank * 31) as f32).sin()).collect();
    let mut times = [Vec::new(), Vec::new()];
    for _ in 0..ROUNDS {
        let mut sums = [first.clone(), first.clone()];
        let [cut, uncut] = &mut sums;
        for (side, values) in [cut, uncut].into_iter().enumerate() {
            world.all_gather(&[])?;
            let began = Instant::now();
            match side {
                0 => world.all_reduce(values)?,
                _ => whole(&world, values)?,
            }
            world.all_gather(&[])?;
            times[side].push(began.elapsed());
        }
        let same = sums[0].iter().zip(&sums[1]).all(|(a, b)| a.to_bits() == b.to_bits());
        assert!(same, "both sum in order of rank");
    }
    let [cut, uncut] = times.map(|mut times| {
        times.sort();
        times[ROUNDS / 2]
    });
    if rank == 0 {
        let ratio = uncut.as_secs_f64() / cut.as_secs_f64();
        println!("{ranks} ranks, {values} values: {cut:.1?}, whole {uncut:.1?}, ratio {ratio:.2}");
    }
    Ok(())
}
